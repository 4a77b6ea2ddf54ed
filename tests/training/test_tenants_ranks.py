"""Tenants whose rows are on several data-parallel ranks train as in one process."""

import pytest
import tenant_ranks
from conftest import on_gpu
from ranks import ON_CPUS, run_cases

MODULES = "moelora.training torch.distributed pytest"


@pytest.mark.parametrize(
    ("processes", "cases"),
    [(2, ["train", "resume", "stop", "disagree"]), (4, ["train", "stop"])],
    ids=["2", "4"],
)
@pytest.mark.parametrize("device", ["cpu", on_gpu("cuda")])
def test_ranks_train_as_one_process(tmp_path, device, processes, cases):
    environment = ON_CPUS if device == "cpu" else {}
    run_cases(
        tenant_ranks.__file__,
        str(tmp_path),
        device,
        cases=cases,
        modules=MODULES,
        processes=processes,
        **environment,
    )
