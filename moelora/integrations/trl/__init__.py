"""TRL's trainers with vLLM in their process: adapters are pushed, instead of merged and sent.

    from moelora.integrations.trl import PushesAdapters

    class Trainer(PushesAdapters, GRPOTrainer):
        pass

    args = GRPOConfig(use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=False)
    trainer = Trainer(model, reward, args, peft_config=LoraConfig(...))

Before each generation TRL (1.16) calls `vllm_generation.sync_weights`, which merges the adapters of
a PEFT model into its weights, gives vLLM all of them, and takes the adapters out again. Here it
gives vLLM the factors by `update_adapters`, and generation names the new version.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as max_lora_rank
NAME = "policy"


class PushesAdapters:
    """A mixin for GRPOTrainer and other trainers with `VLLMGeneration`: the first of the bases.

    Attributes
    ----------
    lora_request : vllm.lora.request.LoRARequest or None
        The version that the last generation took; None before the first.

    Raises
    ------
    ValueError
        As the trainer is made: the model has no LoRA of PEFT, vLLM is not colocated, or may sleep.
        As it pushes: what `engine_tensors` or `update_adapters` refuse.
    """

    lora_request: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _starting_with_lora(self):
            super().__init__(*args, **kwargs)
        generation: Any = getattr(self, "vllm_generation", None)
        if generation is None or generation.mode != "colocate":
            raise ValueError(
                'the trainer has no vLLM in its process: use_vllm=True, vllm_mode="colocate"'
            )
        generation.sync_weights = self.push_adapters
        generation.llm.generate = functools.partial(self._generate_with, generation.llm.generate)

    def push_adapters(self) -> None:
        """Give vLLM the factors that the model has now, as the trainer does before it generates."""
        from moelora.integrations.peft import engine_tensors
        from moelora.integrations.vllm import update_adapters

        generation: Any = self.vllm_generation  # type: ignore[attr-defined] # of the trainer
        model = generation.model
        trained = [p for p in model.parameters() if p.requires_grad]
        with generation._dist.gather_params(trained):  # of ZeRO-3
            tensors = engine_tensors(model, _adapter(model))
        self.lora_request = update_adapters(generation.llm, {NAME: tensors})[NAME]

    def _generate_with(self, generate: Any, *args: Any, **kwargs: Any) -> Any:
        return generate(*args, **{"lora_request": self.lora_request} | kwargs)


def _adapter(model: Any) -> str:
    names: list[str] = model.active_adapters
    if len(names) != 1:
        raise ValueError(f"the active adapters are {names}, wanted one")
    return names[0]


@contextmanager
def _starting_with_lora(trainer: Any) -> Iterator[None]:
    """While a trainer is made, its engine starts with slots for its adapter."""
    from peft import PeftModel
    from trl.generation import vllm_generation as place

    engine = getattr(place, "LLM", None)

    def start(**options: Any) -> Any:
        model = trainer.model
        if not isinstance(model, PeftModel):
            raise ValueError(
                f"the model is a {type(model).__name__}, wanted one with LoRA: peft_config="
            )
        if options.get("enable_sleep_mode"):
            raise ValueError(
                "vllm_enable_sleep_mode is True, which discards weights that no push brings back: "
                "set it False; share_experts saves the memory of a second copy"
            )
        config: Any = model.peft_config[_adapter(model)]
        rank = max(config.r, *config.rank_pattern.values()) if config.rank_pattern else config.r
        most = min((r for r in RANKS if r >= rank), default=rank)
        return engine(**options, enable_lora=True, max_loras=1, max_lora_rank=most)  # type: ignore[misc]

    if engine is None:  # TRL says itself that vLLM is not installed
        yield
        return
    place.LLM = start
    try:
        yield
    finally:
        place.LLM = engine
