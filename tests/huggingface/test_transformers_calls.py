"""Calls of a model with adapters: threads, interrupts, copies, compilers, and who is refused."""

import contextlib
import copy
import inspect
import pickle
import sys
import threading

import pytest
import torch
from covering import extent
from hf_models import ROWS, make_model, one_layer, save_adapters, tokens
from interrupts import signals
from threads import elsewhere, run_threads

import moelora.integrations.transformers as moelora_hf

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def loaded(tmp_path):
    """A model with adapters a, b, c."""
    model = make_model("mixtral")
    moelora_hf.load_adapters(model, save_adapters(model, tmp_path))
    return model


# ---- threads ----


def test_threads_share_a_model(loaded):
    """Base and adapter calls at the same time, in every way to name adapters, all answers right."""
    torch.set_num_threads(1)
    ids = tokens(rows=2, length=3)
    cases = [["a", "b"], ["c", None], [None, "a"], ["b", "b"]]
    base = loaded(ids).logits
    wanted = [loaded(ids, adapter_names=names).logits for names in cases]
    assert all(not torch.equal(w, base) for w in wanted)
    kinds = ["base", "argument", "context", "rejected"]

    def serve(thread):
        kind, wrong = kinds[thread], 0
        for n in range(extent(nightly=1000, ci=200)):
            names, expected = cases[n % 4], wanted[n % 4]
            if kind == "base":
                wrong += not torch.equal(loaded(ids).logits, base)
            elif kind == "argument":
                wrong += not torch.equal(loaded(ids, adapter_names=names).logits, expected)
            elif kind == "context":
                with moelora_hf.use_adapters(loaded, names):
                    wrong += not torch.equal(loaded(ids).logits, expected)
            else:
                with pytest.raises(ValueError, match="names 1 rows"):
                    loaded(ids, adapter_names=["a"])
        return wrong

    assert run_threads(serve, len(kinds)) == [0] * len(kinds)


def test_a_pass_keeps_its_adapters(loaded):
    """What another thread enters and leaves in the middle of a pass is not for this pass, nor are
    the adapters of this thread for another one."""
    ids = tokens(rows=1)
    base, adapted = loaded(ids).logits, loaded(ids, adapter_names=["a"]).logits

    def interfere(*_):
        if threading.current_thread() is threading.main_thread():
            results.append(elsewhere(lambda: loaded(ids, adapter_names=["a"]).logits))
            results.append(elsewhere(lambda: loaded(ids).logits))

    for names, wanted in (([None], base), (["a"], adapted)):
        results = []
        hook = loaded.model.layers[0].register_forward_hook(interfere)
        with moelora_hf.use_adapters(loaded, names):
            assert torch.equal(loaded(ids).logits, wanted)
        hook.remove()
        assert torch.equal(results[0], adapted)
        assert torch.equal(results[1], base)


# ---- interrupts ----


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
@pytest.mark.parametrize("where", ["model.layers.0.mlp.experts", "model.layers.1", "lm_head"])
def test_nothing_is_left_of_an_interrupted_call(loaded, error, where):
    ids = tokens()
    base = loaded(ids).logits

    def interrupt(*_):
        raise error

    options = {"max_new_tokens": 2, "do_sample": False}
    text = loaded.generate(ids, **options)
    hook = loaded.get_submodule(where).register_forward_pre_hook(interrupt)
    for call in (loaded, loaded.generate):
        with pytest.raises(error):
            call(ids, adapter_names=ROWS)
    with pytest.raises(error), moelora_hf.use_adapters(loaded, ROWS):
        loaded(ids)
    hook.remove()
    assert torch.equal(loaded(ids).logits, base)
    assert torch.equal(loaded.generate(ids, **options), text)
    loaded._moelora.pool.remove("a")  # no batch holds it


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in finalizers
def test_ctrl_c(loaded):
    """A signal at any moment of a call with `adapter_names`, then a base call."""
    torch.set_num_threads(1)
    ids = tokens(length=4)
    base = loaded(ids).logits

    def serve():
        while True:
            loaded(ids, adapter_names=ROWS)

    with signals() as interrupted_after:
        for n in range(extent(nightly=60, ci=20)):
            assert interrupted_after(serve, 1e-6 + extent(1e-4, 3e-4) * n)
            assert torch.equal(loaded(ids).logits, base), n


def test_interrupts_whose_tracebacks_are_kept(loaded):
    """Ctrl-C as a function of a call or of its contexts begins, where Python looks for signals,
    then a base call, while the traceback keeps frames, as that of a notebook's last cell."""
    ids, kept = tokens(length=4), []
    base = loaded(ids).logits
    files = {contextlib.__file__, inspect.getfile(type(loaded._moelora))}

    def interrupted_at(number):
        left = number

        def profile(frame, event, argument):
            nonlocal left
            left -= event == "call" and frame.f_code.co_filename in files
            if not left:
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(profile)
        try:
            loaded(ids, adapter_names=ROWS)
        except KeyboardInterrupt as interrupt:
            kept.append(interrupt)
            return True
        finally:
            sys.setprofile(None)
        return False

    while interrupted_at(len(kept) + 1):
        assert torch.equal(loaded(ids).logits, base), len(kept)
    assert len(kept) > 10


# ---- who is refused ----


def test_adapter_names_without_adapters(tmp_path):
    """A model without adapters would give base logits to a caller who asked for others."""
    plain = make_model("mixtral")
    ids = tokens()
    names = ["a"] * 5

    def refuses_to_generate(model):
        with pytest.raises(RuntimeError, match="no adapters; call load_adapters first"):
            model.generate(ids, adapter_names=names)
        assert model.generate(ids, adapter_names=None, max_new_tokens=1).shape == (5, 8)

    def check(model):
        for refusing in (model, model.model):
            with pytest.raises(RuntimeError, match=f"{type(refusing).__name__}.* no adapters"):
                refusing(ids, adapter_names=names)
        refuses_to_generate(model)
        torch.testing.assert_close(model(ids, adapter_names=None).logits, wanted)

    wanted = plain(ids).logits
    refuses_to_generate(plain)  # nor has it moelora's experts
    never = copy.deepcopy(plain)
    never.set_experts_implementation("moelora")
    check(never)
    plain.save_pretrained(tmp_path / "model")
    check(type(plain).from_pretrained(tmp_path / "model", experts_implementation="moelora"))
    check(pickle.loads(pickle.dumps(never)))

    once = copy.deepcopy(plain)
    moelora_hf.load_adapters(once, save_adapters(plain, tmp_path))
    moelora_hf.unload_adapters(once)
    check(once)


def test_the_signatures_stay(loaded):
    """generate and Trainer look at them."""
    for name in ("forward", "generate"):
        wanted = inspect.signature(getattr(make_model("mixtral"), name))
        assert inspect.signature(getattr(loaded, name)) == wanted


def test_other_wrappers_of_the_forward_pass(loaded):
    """accelerate's hooks, which also take the place of `model.forward`, before and after ours."""
    accelerate = pytest.importorskip("accelerate")
    ids = tokens()
    wanted = loaded(ids, adapter_names=ROWS).logits
    accelerate.hooks.add_hook_to_module(loaded, accelerate.hooks.ModelHook())
    assert torch.equal(loaded(ids, adapter_names=ROWS).logits, wanted)
    before = loaded.forward
    loaded.set_experts_implementation("eager")
    loaded.set_experts_implementation("moelora")
    assert loaded.forward is before
    accelerate.hooks.remove_hook_from_module(loaded)
    assert torch.equal(loaded(ids, adapter_names=ROWS).logits, wanted)


# ---- compilers ----


def test_compiled_calls_take_adapter_names(tmp_path):
    """With graph breaks where the pool is asked."""
    torch.compiler.reset()
    model = make_model(one_layer("mixtral"))
    moelora_hf.load_adapters(model, save_adapters(model, tmp_path))
    ids = tokens()
    compiled = torch.compile(model, backend="eager")
    for names in (ROWS, ["b"] * 5, None, ROWS):
        wanted = model(ids, adapter_names=names).logits
        torch.testing.assert_close(compiled(ids, adapter_names=names).logits, wanted)
