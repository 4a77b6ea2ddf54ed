"""The demo model and its adapters behind the interfaces of three engines.

    python examples/engines.py

One prompt, five rows, each with another adapter: through transformers, through PEFT, and each layer
once more from buffers as SGLang keeps them.
"""

from types import SimpleNamespace

import torch
import transformers
from demo_data import ADAPTER_DOMAINS, ADAPTERS_DIR, MODEL_DIR, decode, encode
from peft import PeftModel
from transformers.utils import logging

import moelora.integrations.peft as moelora_peft
import moelora.integrations.transformers as moelora_hf
from moelora.integrations.sglang import experts_with_lora

PROMPT = "    self."
NAMES = [*ADAPTER_DOMAINS, "__base__"]


def load_model():
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    return model.eval()


def generate(model) -> list[str]:
    ids = encode(PROMPT).expand(len(NAMES), -1)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 36, "do_sample": False}
    texts = model.generate(input_ids=ids, adapter_names=NAMES, **options)
    return [decode(text) for text in texts]


def with_transformers():
    model = load_model()
    pool = moelora_hf.load_adapters(model, [ADAPTERS_DIR / name for name in ADAPTER_DOMAINS])
    return model, pool, generate(model)


def with_peft() -> list[str]:
    first, *others = ADAPTER_DOMAINS
    model = PeftModel.from_pretrained(load_model(), ADAPTERS_DIR / first, adapter_name=first)
    for name in others:
        model.load_adapter(ADAPTERS_DIR / name, adapter_name=name)
    moelora_peft.attach(model.eval())
    return generate(model)


def with_sglang_buffers(model, pool) -> float:
    """The largest difference of any layer's output, over its largest value."""
    differences = []
    ids = encode(PROMPT).expand(len(NAMES), -1)
    tokens = [None if name == moelora_hf.BASE else name for name in NAMES for _ in ids[0]]
    mapping = pool.mapping(tokens)

    def compare(experts, inputs, output):
        hidden_states, topk_ids, topk_weights = inputs
        stacks = pool.layer(experts._moelora_layer)
        a, b = stacks["w13_lora_a"], stacks["w13_lora_b"]
        scalings = pool.lora_scalings[:, None, None, None]
        batch = SimpleNamespace(  # SGLang's MoeLoraBatch: up below gate, scalings in B
            gate_up_lora_a=torch.cat([a, a], dim=2),
            gate_up_lora_b=scalings * b,
            down_lora_a=stacks["w2_lora_a"],
            down_lora_b=scalings * stacks["w2_lora_b"],
            token_lora_mapping=mapping,
        )
        again = experts_with_lora(
            hidden_states, experts.gate_up_proj, experts.down_proj, topk_weights, topk_ids, batch
        )
        differences.append(((again - output).abs().max() / output.abs().max()).item())

    hooks = [m.register_forward_hook(compare) for m, _ in moelora_hf.moe_layers(model).values()]
    model(ids, adapter_names=NAMES)
    for hook in hooks:
        hook.remove()
    return max(differences)


@torch.no_grad()
def main() -> None:
    logging.disable_progress_bar()
    model, pool, texts = with_transformers()
    for name, text in zip(NAMES, texts, strict=True):
        print(f"{name:9} {text!r}")
    print("PEFT's model generates the same:", with_peft() == texts)
    print(
        f"SGLang's buffers, largest difference of a layer: {with_sglang_buffers(model, pool):.1e}"
    )


if __name__ == "__main__":
    main()
