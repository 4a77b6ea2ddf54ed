"""Tenants whose rows are on several data-parallel ranks train as in one process."""

import pytest
import tenant_ranks
from ranks import ON_CPUS, run_cases
from tenant_house import FLOAT32, House

MODULES = "moelora.training torch.distributed pytest"


@pytest.mark.parametrize(
    ("processes", "cases"),
    [(2, ["train", "resume", "stop", "disagree"]), (4, ["train"])],
    ids=["2", "4"],
)
def test_ranks_train_as_one_process(tmp_path, device, processes, cases):
    options = {"modules": MODULES, "processes": processes} | (ON_CPUS if device == "cpu" else {})
    run_cases(tenant_ranks.__file__, str(tmp_path), device, cases=cases, **options)


@pytest.mark.parametrize("group", ["world", 2, -100])
def test_a_group_without_this_process_is_refused(group):
    with pytest.raises(ValueError, match=f"group is '?{group}.*of which this process is a rank"):
        House(FLOAT32, group=group)
