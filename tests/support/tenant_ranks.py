"""What the processes of tests/training/test_tenants_ranks.py run.

    tenant_ranks.py FOLDER DEVICE CASE ...

A case is a name of a function below. FOLDER is empty.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of conftest.py
from ranks import fails_on_last, work
from tenant_house import OPTIONS, PLACES, House, calls_in_backward, same

# Of each step, the tenants that have rows on the first rank, the second, the third ...
STEPS = [
    [["law", "code"], ["law"], ["med"], ["law"]],
    [["law", "code"], ["med"], ["code"], []],
    [[], ["code", "law"], ["law"], ["med"]],
    [["law", "med"], ["med", "law"], [], ["law", "med"]],
]
WEIGHTS = [1.0, 3.0, 2.0, 0.5]  # of the losses of each rank


def batches(step, chosen):
    """Of a step, each rank's names and the number of its batch."""
    every = enumerate(STEPS[step][: dist.get_world_size()])
    return [([n for n in names if n in chosen], 10 * step + rank) for rank, names in every]


def joint(place, names=OPTIONS, **options):
    """A house of this rank. Generators differ, and the first rank's counts."""
    house = House(place, group=dist.group.WORLD, **options)
    for name in names:
        seed = sum(name.encode()) + 1000 * dist.get_rank()
        house.add(name, generator=torch.Generator().manual_seed(seed))
    return house


def steps_of(house, numbers, chosen=OPTIONS):
    """Steps of the rows of this rank; the same result on all."""
    done = []
    for step in numbers:
        names, number = batches(step, chosen)[dist.get_rank()]
        losses = house.losses(names, number) if names else {}
        weight = WEIGHTS[dist.get_rank()]
        done.append(house.tenants.step(losses, weights=dict.fromkeys(losses, weight)))
    return done


def steps_of_one(house, numbers):
    """The same steps in one process, which has the rows of all."""
    done = []
    for step in numbers:
        sums, total = {}, {}
        for (names, number), weight in zip(batches(step, OPTIONS), WEIGHTS, strict=False):
            for name, loss in (house.losses(names, number) if names else {}).items():
                sums[name] = sums.get(name, 0) + weight * loss
                total[name] = total.get(name, 0) + weight
        done.append(house.tenants.step({n: loss / total[n] for n, loss in sums.items()}))
    return done


def content(house):
    names = house.tenants.names()
    return {name: (house.factors(name), house.tenants[name].stopped) for name in names}


def check_equal_on_ranks(house, *more):
    """Factors bit for bit, who is stopped and why, and `more`."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (content(house), repr(more)))
    (first, same_more), *others = every
    for factors, other_more in others:
        assert other_more == same_more, (other_more, same_more)
        assert factors.keys() == first.keys()
        for name, (tensors, stopped) in factors.items():
            assert same(tensors, first[name][0]) and stopped == first[name][1], name


def train(folder, place):
    """As one process does on the rows of all; whoever is in the steps changes no bits."""
    house, one = joint(place), House(place, *OPTIONS)
    done, expected = steps_of(house, range(4)), steps_of_one(one, range(4))
    check_equal_on_ranks(house, done)
    assert house.pool.version("law") == 5
    most = 1e-3 if place[1] == torch.float32 else 0.1
    for ours, theirs in zip(done, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, step in ours.items():
            assert step.updated == theirs[name].updated and step.stopped is None
            assert step.loss == pytest.approx(theirs[name].loss, rel=most)
    for name in OPTIONS:
        for found, wanted in zip(house.factors(name), one.factors(name), strict=True):
            off = ((found - wanted).norm() / (wanted.norm() + 1e-6)).item()
            assert off < most, (name, off)
        alone = joint(place, [name], max_loras=1)
        steps_of(alone, range(4), [name])
        assert same(alone.factors(name), house.factors(name)), name


def resume(folder, place):
    """Ranks continue what they, or one process, have saved; the first writes."""
    house = joint(place)
    steps_of(house, range(1))
    for name in OPTIONS:
        # Each has a folder of its own name: that of the first is written.
        house.tenants.save(name, folder / f"{name} of rank {dist.get_rank()}")
    assert len(list(folder.glob("law of rank *"))) == 1
    saved = {name: folder / f"{name} of rank 0" for name in OPTIONS}
    steps_of(house, range(1, 4))
    again = joint(place, [])
    for name, source in saved.items():
        again.add(name, source, resume=True)
    again.tenants.remove("med")
    again.add("med", saved["med"], resume=True)
    steps_of(again, range(1, 4))
    check_equal_on_ranks(again)
    one = House(place)
    for name, source in saved.items():
        one.add(name, source, resume=True)
        assert same(house.factors(name), again.factors(name)), name
    steps_of_one(one, range(1, 4))
    for name in OPTIONS:
        if dist.get_rank() == 0:
            one.tenants.save(name, folder / f"{name} of one")
        dist.barrier()
        again.tenants.remove(name)
        again.add(name, folder / f"{name} of one", resume=True)
        assert same(one.factors(name), again.factors(name)), name


class Failing(torch.optim.SGD):
    """Fails in its second step on the last rank."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        if self.count == 2 and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("optimizer is broken")
        return super().step(closure)


def stop(folder, place):
    """What goes wrong on the last rank stops one tenant, on all ranks alike."""
    last = dist.get_world_size() - 1
    is_last = dist.get_rank() == last

    def raises(loss):
        raise ZeroDivisionError("no rows")

    bad = {
        "nan": (lambda loss: loss * float("nan"), f"rank {last}: its loss is nan"),
        "gradient": (lambda loss: (loss * 0).sqrt(), "the norm of its gradients is"),
        "exception": (raises, f"rank {last}: its loss raised ZeroDivisionError: no rows"),
        "optimizer": (None, f"rank {last}: its optimizer raised RuntimeError: optimizer is broken"),
        "removed": (None, f"rank {last}: the pool has removed or replaced its adapter"),
        "backward": (None, f"rank {last}: the backward of its loss raised RuntimeError: broken"),
    }
    clean = joint(place, ["law", "code"])
    steps_of(clean, range(4), ["law", "code"])
    for kind, (break_loss, why) in bad.items():
        house = joint(place, ["law", "code"])
        make = (lambda p: Failing(p, lr=0.1)) if kind == "optimizer" else None
        house.add("med", weight_decay=0.0, **({} if make is None else {"optimizer": make}))
        steps_of(house, range(1), ["law", "code"])
        house.tenants.step(house.losses(["med"], 0))
        before = house.factors("med")
        if kind == "removed" and is_last:
            house.pool.remove("med")
        names, number = batches(1, ["law", "code"])[dist.get_rank()]
        losses = house.losses(names, number) if names else {}
        weights = dict.fromkeys(losses, WEIGHTS[dist.get_rank()])
        if not (kind == "removed" and is_last):
            loss = house.losses(["med"], 1)["med"]
            if is_last and break_loss is not None:
                losses["med"] = lambda loss=loss, wrong=break_loss: wrong(loss)
            elif is_last and kind == "backward":

                def fail():
                    raise RuntimeError("broken")

                losses["med"] = calls_in_backward(loss, fail)
            else:
                losses["med"] = loss
        if kind == "backward":
            with pytest.raises(RuntimeError, match="'med' raised RuntimeError: broken"):
                house.tenants.step(losses, weights=weights)
            losses = house.losses(names, number) if names else {}
            done = house.tenants.step(losses, weights=weights)
        else:
            done = house.tenants.step(losses, weights=weights)
            assert done["med"].stopped.startswith(why), done["med"]
        assert house.tenants["med"].stopped.startswith(why), house.tenants["med"].stopped
        assert house.tenants.running() == ["law", "code"]
        if kind != "removed":
            assert same(before, house.factors("med")), kind
            check_equal_on_ranks(house, done)
        steps_of(house, range(2, 4), ["law", "code"])
        for name in ("law", "code"):
            assert same(clean.factors(name), house.factors(name)), (kind, name)


def disagree(folder, place):
    """Each difference is an error of all ranks, and changes nothing."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    is_last = rank == last
    others = {"max_rank": 4}, {"dtype": torch.bfloat16}
    for options, match in zip(others, ("max_rank is 8", "shape and dtype of A of"), strict=True):
        with pytest.raises(RuntimeError, match=f"disagree: {match}.* on rank {last}"):
            House(place, group=dist.group.WORLD, **(options if is_last else {}))
    house = joint(place, ["law", "code"])
    tenants = house.tenants
    steps_of(house, range(1), ["law", "code"])
    before = content(house)

    def differ(match):
        return pytest.raises(RuntimeError, match=f"disagree: {match}.* on rank {last}")

    with differ("call is add of tenant 'a'"):
        house.add("b" if is_last else "a")
    with differ("rank is 4"):
        house.add("a", rank=3 if is_last else 4)
    with differ("lr of group 0 of tenant 'a' is"):
        house.add("a", lr=0.2 if is_last else 0.1)
    with differ("source is absent"):
        house.add("a", {} if is_last else None)
    with fails_on_last(ValueError, "lr is -1"):
        house.add("a", lr=-1 if is_last else 1)
    if is_last:
        house.pool.add("a", tenants["law"].adapter())
    with fails_on_last(ValueError, "already loaded"):
        house.add("a")
    house.pool.remove("a") if is_last else None
    with differ("call is step"):
        tenants.remove("law") if is_last else tenants.step({})
    with fails_on_last(KeyError, "no tenant 'nobody'"):
        tenants.step({"nobody": torch.zeros(())} if is_last else {})
    with fails_on_last(ValueError, "weight of 'law' is 0"):
        losses = house.losses(["law"], 0)
        tenants.step(losses, weights={"law": 0 if is_last else 1})
    for setting, value in (("max_norm", 2.0), ("accumulation", 7)):
        old = getattr(tenants["law"], setting)
        if is_last:
            setattr(tenants["law"], setting, value)
        with differ(f"{setting} of tenant 'law'"):
            tenants.step({})
        setattr(tenants["law"], setting, old)
    factor = tenants["code"].factors()[0].parameter.data
    saved = factor.clone()
    factor[0] += is_last
    with differ("the checksum of factors"):
        tenants.save("code", folder / "code")
    factor.copy_(saved)
    (folder / "file").touch()
    with pytest.raises((OSError, RuntimeError), match="file"):
        tenants.save("law", folder / "file")  # which the first rank fails to write
    assert not (folder / "code").exists()
    with contextlib.ExitStack() as held:
        if is_last:
            held.enter_context(house.pool.hold(["law"]))
        with fails_on_last(RuntimeError, "'law' is in use by 1 batches"):
            tenants.remove("law")
    assert tenants.names() == ["law", "code"]
    for name, (factors, _) in before.items():
        assert same(house.factors(name), factors), name
    steps_of(house, range(1, 2), ["law", "code"])
    check_equal_on_ranks(house)


def main():
    folder, device = Path(sys.argv[1]), sys.argv[2]
    places = [place.values[0] for place in PLACES if place.values[0][0] == device]

    def run(case):
        # What goes wrong is the same in each dtype.
        every = case in ("train", "resume") and dist.get_world_size() == 2
        for number, place in enumerate(places if every else places[-1:]):
            own = folder / f"{case} {number}"
            if dist.get_rank() == 0:
                own.mkdir()
            dist.barrier()
            globals()[case](own, place)

    work(run, sys.argv[3:])


if __name__ == "__main__":
    main()
