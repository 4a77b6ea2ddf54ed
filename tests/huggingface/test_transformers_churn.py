"""More adapters than slots, and adapters that change, in a model of transformers."""

import pytest
import torch
from adapter_cases import CONFIG, LAYERS, make_pool, wrapped
from hf_models import PLACES, tokens
from threads import run_threads
from whole_models import make_whole_model, served, write_adapters

import moelora.integrations.transformers as moelora_hf
from moelora.integrations.transformers import continuous
from moelora.integrations.transformers.serving import Serving

pytestmark = pytest.mark.usefixtures("no_grad")

PLACE = [PLACES[0], PLACES[2]]


@pytest.fixture(params=PLACE)
def churning(request, tmp_path):
    """A model with three adapters and one slot, and the same model with a slot for each."""
    device, dtype = request.param
    models = [make_whole_model("qwen3_moe", dtype, device) for _ in range(2)]
    folders = write_adapters(models[0], tmp_path)
    pools = [
        moelora_hf.load_adapters(models[0], folders, max_loras=1, host=2, targets="all"),
        moelora_hf.load_adapters(models[1], folders, targets="all"),
    ]
    return *models, *pools, list(folders)


def check(got, wanted):
    """The same bits on a CPU; on a GPU the number of slots may choose another kernel."""
    if got.device.type == "cpu":
        assert torch.equal(got, wanted)
    else:
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)


def test_more_adapters_than_slots(churning):
    model, roomy, pool, _, names = churning
    assert len(names) > 2 and len(pool) <= pool.max_loras == 1
    ids = tokens(rows=1, length=5).to(model.device)
    for name in (*names, None, *names):
        got = model(ids, adapter_names=[name]).logits
        check(got, roomy(ids, adapter_names=[name]).logits)
        with moelora_hf.use_adapters(model, [name]):
            assert torch.equal(model(ids).logits, got)
    with pytest.raises(RuntimeError, match="a batch names 2 adapters, the pool has 1 slots"):
        model(ids.expand(2, -1), adapter_names=names[:2])


def test_threads_wait_for_slots(churning):
    model, roomy, _, _, names = churning
    ids = tokens(rows=1, length=5).to(model.device)
    wanted = {name: roomy(ids, adapter_names=[name]).logits for name in names}

    def work(start):
        for turn in range(6):
            name = names[(start + turn) % len(names)]
            got = model(ids, adapter_names=[name]).logits
            check(got, wanted[name])

    run_threads(work, 3)


@pytest.mark.skipif(bool(continuous.missing()), reason="continuous batching without arguments")
def test_requests_of_more_adapters_than_slots(churning):
    from test_continuous_batching import alone, options, texts

    model, roomy, _, _, names = churning
    every = tokens(rows=1, length=7)[0].tolist()
    prompts = [every[: 4 + n] for n in range(len(names))]
    if model.dtype != torch.float32:
        pytest.skip("two tokens may be as likely in bfloat16")
    wanted = [alone(roomy, p, n) for p, n in zip(prompts, names, strict=True)]
    got = model.generate_batch(prompts, adapter_names=names, **options())
    assert texts(got) == wanted


def test_rows_switch_to_a_new_version_in_their_next_pass(tmp_path):
    model, ids, folders = served(tmp_path, rows=1, length=5)
    pool = moelora_hf.load_adapters(model, folders, max_loras=len(folders) + 1, targets="all")
    first, second = list(folders)[:2]
    old, new = (model(ids, adapter_names=[name]).logits for name in (first, second))
    with moelora_hf.use_adapters(model, [first]):
        assert pool.update(first, folders[second]) == 2
        assert torch.equal(model(ids).logits, old), "it finishes"
    with moelora_hf.use_adapters(model, [first]):
        assert torch.equal(model(ids).logits, new)
        assert pool.update(first, folders[first], in_flight="switch") == 3
        assert torch.equal(model(ids).logits, old)


@pytest.mark.gpu
def test_slots_are_written_after_the_stream_of_the_model():
    """Continuous batching looks slots up on another stream than the model's."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    serving, stream = Serving(), torch.cuda.Stream()
    serving.pool = pool = make_pool(max_loras=1, host=1, device="cuda")
    pool.register("a", wrapped()[0], config=CONFIG)
    ends = torch.tensor([0, 1, 3], dtype=torch.int32, device="cuda")
    ids = torch.zeros(1, 3, dtype=torch.int64, device="cuda")
    slots = torch.tensor([0, -1], dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        serving._packed(slots, {"input_ids": ids, "cu_seq_lens_q": ends})
        torch.cuda._sleep(200_000_000)
        read = pool.layer(LAYERS[0].name)["w2_lora_a"].clone()
    pool.lookup("a")
    torch.cuda.synchronize()
    assert not read.any(), "the slot was written while the model read it"
