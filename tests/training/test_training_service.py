"""examples/training_service.py: clients train as if each was alone, on fewer slots than clients."""

import threading

import pytest
import torch
from checkout import needs_checkout

transformers = pytest.importorskip("transformers")
training_service = pytest.importorskip("training_service")

pytestmark = needs_checkout
TEXTS = [b"def f(x):", b"import os, sys", b"class A(B):", b"0x0041, # LATIN", b"The rule is that"]


@pytest.fixture
def make(tmp_path):
    def service(**options):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            training_service.MODEL_DIR, dtype=torch.float32
        )
        return training_service.Service(model, max_rank=4, out=tmp_path, **options)

    return service


def train(service, client, text, steps=3):
    """Losses of a client that learns a text."""
    losses = []
    for _ in range(steps):
        losses += service.forward_backward(client, [list(text)])
        service.optim_step(client, lr=2e-2)
    return losses


def test_many_clients_train_as_each_alone(make, tmp_path):
    """At the same time, in fewer slots: adapters, optimizers and gradients swap to the host."""
    service = make(slots=2)
    clients = [service.create(rank=n % 4 + 1, seed=n) for n in range(len(TEXTS))]
    found = {}

    def run(n):
        found[n] = train(service, clients[n], TEXTS[n])

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(TEXTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in (0, 3):
        alone = make(slots=1)
        wanted = train(alone, alone.create(rank=n % 4 + 1, seed=n), TEXTS[n])
        assert found[n] == pytest.approx(wanted, rel=1e-3)
        assert wanted[2] < wanted[0] - 0.1
    service.forward_backward(clients[0], [list(TEXTS[0])])  # which a save keeps
    folder = service.save(clients[0], "law")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        training_service.MODEL_DIR, dtype=torch.float32
    )
    pool = training_service.moelora_hf.load_adapters(model, {"law": folder})
    prompt = torch.tensor([list(TEXTS[0][:4])])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(prompt, adapter_names=["law"], **options)[0, 4:].tolist()
    assert service.sample(clients[0], list(TEXTS[0][:4]), 5) == wanted
    assert pool.names() == ["law"] and (tmp_path / "law/training.json").exists()


def test_calls_that_wait_share_a_batch(make):
    service = make(slots=3, thread=False)
    jobs = []
    for n in range(4):
        jobs.append(service.submit("_create", f"a{n}", rank=2, alpha=None, seed=n))
        service.run()
    rows = {"rows": [list(TEXTS[0])], "weights": [[1.0] * (len(TEXTS[0]) - 1)]}
    for n in (0, 1, 0, 2, 3):
        jobs.append(service.submit("_forward_backward", f"a{n}", **rows))
    jobs.append(service.submit("_optim_step", "a0", lr=1e-2))
    jobs.append(service.submit("_forward_backward", "a0", **rows))
    for _ in range(4):
        service.run()
    assert service.batches == [["a0", "a1", "a0", "a2"], ["a3"], ["a0"]]
    assert all(job.done() for job in jobs)
    assert jobs[-1].result()[0] < jobs[4].result()[0]  # after the step, as it was called


BAD = {
    "rank": (lambda s, c: s.create(rank=5), "rank is 5, wanted an integer of 1 to 4"),
    "token": (lambda s, c: s.forward_backward(c, [[1, 256]]), "256 is not an integer of 0 to 255"),
    "no tokens": (lambda s, c: s.forward_backward(c, [[]]), "there are no tokens"),
    "a word": (lambda s, c: s.forward_backward(c, [[1, 2]], [["one"]]), "could not convert"),
    "weights": (lambda s, c: s.forward_backward(c, [[1, 2]], [[1.0, 1.0]]), "weights are not as"),
    "lr": (lambda s, c: s.optim_step(c, lr=0), "lr is 0, wanted"),
    "half a rank": (lambda s, c: s.create(rank=2.5), "rank is 2.5, wanted an integer of 1 to 4"),
    "alpha": (lambda s, c: s.create(rank=2, alpha="nan"), "alpha is nan, wanted a number"),
    "seed": (lambda s, c: s.create(rank=2, seed=2**64), "seed is .*, wanted an integer"),
    "half a token": (lambda s, c: s.sample(c, [1], 2.5), "max_new_tokens is 2.5, wanted an int"),
    "temperature": (
        lambda s, c: s.sample(c, [1], temperature=float("nan")),
        "temperature is nan, wanted 0, or 0.001 to 1000",
    ),
    "too many": (lambda s, c: s.sample(c, [1], 10**9), "1000000001 tokens, wanted at most 1024"),
    "too long": (lambda s, c: s.forward_backward(c, [[1] * 1025]), "1025 tokens, wanted at most"),
    "a path": (lambda s, c: s.save(c, "../law"), "name is '../law', wanted up to 64 letters"),
    "not finite": (
        lambda s, c: s.forward_backward(c, [[1, 2]], [[float("inf")]]),
        "a loss is not finite: .* gradients are dropped",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_calls_are_refused(make, bad):
    service = make(slots=1)
    client = service.create(rank=2)
    call, why = BAD[bad]
    with pytest.raises(ValueError, match=why):
        call(service, client)
    with pytest.raises(KeyError):
        service.optim_step("a7")
    losses = train(service, client, TEXTS[0], steps=2)
    assert losses[1] < losses[0]


def test_a_client_does_not_disturb_others_of_its_batch(make):
    """Its gradients that are not finite, its call that it cancels, its answer that ends earlier."""
    service = make(slots=2, thread=False)

    def run(*calls):
        jobs = [service.submit(kind, client, **values) for kind, client, values in calls]
        jobs[0].cancel() if calls[0][0] == "_save" else None
        while service._jobs:
            service.run()
        return jobs

    run(*(("_create", c, {"rank": 2, "alpha": None, "seed": n}) for n, c in enumerate("ab")))
    for parameter in service.clients["a"].slot.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    one, two = run(("_optim_step", "a", {"lr": 1e-2}), ("_optim_step", "b", {"lr": 1e-2}))
    assert "not finite" in str(one.exception()) and two.result() is None
    cancelled, saved = run(("_save", "a", {"name": "a"}), ("_save", "b", {"name": "b"}))
    assert cancelled.cancelled() and saved.result().endswith("b")
    call = {"prompt": list(b"def f"), "max_new_tokens": 8, "temperature": 0.0}
    (alone,) = run(("_sample", "a", call))
    service.model.generation_config.eos_token_id = alone.result()[2]
    both = run(("_sample", "a", call), ("_sample", "b", call | {"prompt": list(b"import os, s")}))
    assert [job.result()[:3] for job in (alone, both[0])] == [both[0].result()] * 2
    assert len(both[1].result()) == 8


def test_over_http(make):
    testclient = pytest.importorskip("fastapi.testclient")
    http = testclient.TestClient(training_service.make_app(make(slots=1)))
    (client,) = http.post("/adapters", json={"rank": 2}).json().values()
    path = f"/adapters/{client}"
    losses = []
    for _ in range(2):
        body = {"rows": [list(TEXTS[0])]}
        losses += http.post(f"{path}/forward_backward", json=body).json()["result"]
        assert http.post(f"{path}/optim_step", json={"lr": 1e-2}).status_code == 200
    assert losses[1] < losses[0]
    body = {"prompt": list(b"def "), "max_new_tokens": 3}
    assert len(http.post(f"{path}/sample", json=body).json()["result"]) == 3
    assert http.post(f"{path}/save", json={"name": "law"}).status_code == 200
    for url, body, status in (
        (f"{path}/save", {"name": "a/b"}, 400),
        (f"{path}/save", {"folder": "a"}, 400),
        ("/adapters/a9/optim_step", {}, 404),
        (f"{path}/delete", {}, 404),
    ):
        assert http.post(url, json=body).status_code == status
