"""The committed, trained model and adapters: transformers + PEFT and moelora say the same."""

from pathlib import Path

import pytest
import torch
from checkout import needs_checkout
from torch.nn import functional as F

pytest.importorskip("transformers")
pytest.importorskip("peft")

from demo_data import (
    ADAPTER_DOMAINS,
    ADAPTERS_DIR,
    DOMAINS,
    MODEL_DIR,
    eval_windows,
)
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


@pytest.fixture(scope="module")
def texts():
    """Rows of all domains in turn: the domain of each row, and the tokens."""
    windows = {domain: eval_windows(domain, ROWS) for domain in DOMAINS}
    domains = [domain for _ in range(ROWS) for domain in DOMAINS]
    return domains, torch.stack([windows[d][i] for i in range(ROWS) for d in DOMAINS])


@pytest.fixture(scope="module")
def served():
    model = load_model()
    moelora_hf.load_adapters(model, {name: ADAPTERS_DIR / name for name in ADAPTER_DOMAINS})
    return model


@pytest.fixture(scope="module")
def oracle(texts):
    """Logits of all rows with one adapter at a time: adapter (None = base) -> logits."""
    _, tokens = texts
    with torch.no_grad():
        logits = {None: load_model()(tokens).logits}
        for name in ADAPTER_DOMAINS:
            model = PeftModel.from_pretrained(load_model(), ADAPTERS_DIR / name).eval()
            logits[name] = model(tokens).logits
    return logits


@torch.no_grad()
def test_mixed_batch(texts, served, oracle):
    """Every row has the adapter of its own domain, in one batch: same logits, same losses."""
    domains, tokens = texts
    names = [domain if domain in ADAPTER_DOMAINS else None for domain in domains]
    with moelora_hf.use_adapters(served, names):
        got = served(tokens).logits
    wanted = torch.stack([oracle[name][i] for i, name in enumerate(names)])
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        row_losses(got, tokens), row_losses(wanted, tokens), rtol=1e-5, atol=1e-5
    )


@torch.no_grad()
def test_every_text_with_every_adapter(texts, served, oracle):
    """Same loss per domain and adapter, and each adapter is the best on its own domain."""
    domains, tokens = texts
    losses = {}
    for name in (None, *ADAPTER_DOMAINS):
        with moelora_hf.use_adapters(served, [name] * len(tokens)):
            got = row_losses(served(tokens).logits, tokens)
        wanted = row_losses(oracle[name], tokens)
        for domain in DOMAINS:
            rows = [i for i, d in enumerate(domains) if d == domain]
            losses[domain, name] = got[rows].mean().item()
            assert losses[domain, name] == pytest.approx(wanted[rows].mean().item(), rel=1e-5)
    for domain in ADAPTER_DOMAINS:
        others = [losses[domain, n] for n in (None, *ADAPTER_DOMAINS) if n != domain]
        assert losses[domain, domain] < 0.95 * losses[domain, None]
        assert losses[domain, domain] < min(others)


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
