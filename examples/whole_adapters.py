"""Four adapters of attention and experts, trained with PEFT and served in one batch.

    python examples/whole_adapters.py

Each learns one line of code in a few seconds on a CPU: factors of attention, of routers and of all
experts, as most published adapters have them. `load_adapters` serves the folders that PEFT writes,
every row of a batch with its own; nothing is merged.
"""

import tempfile
from pathlib import Path

import peft
import torch
import transformers
from demo_data import MODEL_DIR, decode, encode

import moelora.integrations.transformers as mt

PROMPT = "    def "
LINES = {
    "parser": "parse_text(self):\n",
    "server": "serve(self, request):\n",
    "window": "draw(self, canvas):\n",
    "tester": "test_empty(self):\n",
}
STEPS, RATE = 40, 0.01


def load_model():
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    return model.eval()


def train(line: str, folder: Path) -> float:
    """Writes an adapter that continues the prompt with `line`; the last loss."""
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(load_model(), config)
    ids = encode(PROMPT + line)[None]
    labels = ids.clone()
    labels[:, : len(PROMPT)] = -100  # the prompt is given
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return loss.item()


def serve(folders: dict[str, Path]) -> list[str]:
    """What one batch generates: a row for each adapter, and one for the base model."""
    model = load_model()
    mt.load_adapters(model, folders)
    names = [*folders, "__base__"]
    ids = encode(PROMPT).expand(len(names), -1)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    return [decode(text) for text in model.generate(ids, adapter_names=names, **options)]


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        folders = {name: Path(place) / name for name in LINES}
        for name, line in LINES.items():
            print(f"{name:9} trained, loss {train(line, folders[name]):.3f}")
        for name, text in zip([*LINES, "__base__"], serve(folders), strict=True):
            print(f"{name:9} {text!r}")


if __name__ == "__main__":
    main()
