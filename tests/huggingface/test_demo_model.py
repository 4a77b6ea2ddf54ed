"""The committed, trained model and adapters: transformers + PEFT and moelora say the same."""

from pathlib import Path

import pytest
import torch
from checkout import needs_checkout
from torch.nn import functional as F

pytest.importorskip("transformers")
pytest.importorskip("peft")

from demo_data import ADAPTER_DOMAINS, ADAPTERS_DIR, DOMAINS, MODEL_DIR, eval_windows
from peft import PeftModel
from transformers import AutoModelForCausalLM

import moelora.integrations.transformers as moelora_hf

pytestmark = needs_checkout

ROWS = 6  # of each domain; with 3 one domain gains 4.6 % only


def load_model():
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()


def row_losses(logits, tokens):
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return losses.mean(dim=1)


@torch.no_grad()
def test_every_text_with_every_adapter():
    """Losses in mixed batches are those of PEFT; each adapter is the best on its own domain."""
    windows = {domain: eval_windows(domain, ROWS) for domain in DOMAINS}
    tokens = torch.cat(list(windows.values()))
    adapters = (None, *ADAPTER_DOMAINS)
    wanted = {None: row_losses(load_model()(tokens).logits, tokens)}
    for name in ADAPTER_DOMAINS:
        model = PeftModel.from_pretrained(load_model(), ADAPTERS_DIR / name).eval()
        wanted[name] = row_losses(model(tokens).logits, tokens)
    served = load_model()
    moelora_hf.load_adapters(served, {name: ADAPTERS_DIR / name for name in ADAPTER_DOMAINS})
    losses = {}
    for turn in range(len(adapters)):  # every row has every adapter, beside rows of the others
        names = [adapters[(turn + row) % len(adapters)] for row in range(len(tokens))]
        got = row_losses(served(tokens, adapter_names=names).logits, tokens)
        for row, name in enumerate(names):
            assert got[row].item() == pytest.approx(wanted[name][row].item(), rel=1e-4)
            losses.setdefault((list(windows)[row // ROWS], name), []).append(got[row].item())
    means = {key: sum(values) / len(values) for key, values in losses.items()}
    for domain in ADAPTER_DOMAINS:
        others = [means[domain, n] for n in adapters if n != domain]
        assert means[domain, domain] < 0.95 * means[domain, None]
        assert means[domain, domain] < min(others)


def test_engines(capsys):
    """examples/engines.py prints what docs/transformers.md shows."""
    import engines

    engines.main()
    *texts, last = capsys.readouterr().out.splitlines()
    page = (Path(__file__).resolve().parents[2] / "docs/transformers.md").read_text()
    assert "\n".join(texts) in page
    label, _, difference = last.rpartition(" ")
    assert label in page
    assert float(difference) < 1e-6
