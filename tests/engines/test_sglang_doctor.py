"""`moelora doctor` on a machine with SGLang, and a plugin that fails without harm."""

import sys

import pytest
from sglang_stand_in import MoeRunner
from stand_in import doctor_on, sample_in_docs

from moelora.integrations.sglang import interface

pytest_plugins = ["sglang_fixtures"]


@pytest.fixture
def doctor(sglang, monkeypatch, capsys):
    """Runs `moelora doctor` on a machine with a GPU and SGLang; (exit status, lines)."""
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    return doctor_on(monkeypatch, capsys, "sglang.srt.plugins", "2.14.1", sglang="0.5.23")


def test_doctor_says_which_layers_run(doctor):
    status, lines = doctor()
    assert status == 0
    assert lines == sample_in_docs(2)


HOOKS = "sglang.srt.plugins.hook_registry"
ON = "plugin: on: SGLang loads the plugin in every process"


@pytest.mark.parametrize(
    ("environment", "absent", "said"),
    [
        ({}, [interface.RUNNER], ON),
        # Without spaces, as SGLang reads them; an empty one loads all plugins.
        ({"SGLANG_PLUGINS": ""}, [], ON),
        ({"SGLANG_PLUGINS": "moelora"}, [], ON),
        ({"SGLANG_PLUGINS": "other, moelora"}, [], ON),
        ({"SGLANG_PLUGINS": "other"}, [], "SGLANG_PLUGINS=other does not name moelora, so SGLang"),
        ({"SGLANG_PLUGINS": ","}, [], "SGLANG_PLUGINS=, does not name moelora, so SGLang does"),
        ({"MOELORA_SGLANG": "false"}, [], "MOELORA_SGLANG=false"),
        ({}, [HOOKS], f"there is no {HOOKS}."),
    ],
)
def test_doctor_says_whether_it_is_on(doctor, monkeypatch, environment, absent, said):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for module in absent:
        monkeypatch.setitem(sys.modules, module, None)
    status, lines = doctor()
    if said == ON:
        assert status == 0 and lines[2] == ON
        assert lines[-1].endswith(" MoeLoraRunner     not in this release") == bool(absent)
    else:
        assert status == 1 and lines[2].startswith(f"plugin: off: {said}")
        assert lines[3] == "SGLang's own path runs"


def test_doctor_of_a_release_whose_layers_are_all_other_ones(doctor, monkeypatch):
    monkeypatch.setitem(sys.modules, interface.RUNNER, None)
    monkeypatch.setattr(MoeRunner, "run", lambda self, dispatched: None)
    status, lines = doctor()
    assert status == 1
    assert lines[2] == "plugin: off: no class of this SGLang is one that moelora can run"
    assert " SGLang's own path: sglang.srt.layers.moe.moe_runner.runner.MoeRunner.run " in lines[3]
