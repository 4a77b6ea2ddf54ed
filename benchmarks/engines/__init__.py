"""What `benchmarks.vllm_e2e` and `sglang_e2e` run: models, engines, and comparison of answers."""
