"""The checker against a brute-force oracle that shares no code with it, on mutated valid schedules."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxbraid.schedule as S
from fxbraid.schedule import Action, Composite, Placement, Schedule, ScheduleError, parts


def runs(schedule: Schedule) -> bool:
    """Can the lists run to their end? Plain sets and a loop until nothing moves; all rules written again."""
    last = schedule.p * schedule.v - 1
    homes = {c: r for r in range(schedule.p) for c in schedule.placement.chunks_of(r)}
    if len(schedule.actions) != schedule.p:
        return False
    for rank, row in enumerate(schedule.actions):
        flat = [a for step in row for a in parts(step)]
        if any(homes.get(a.chunk) != rank for a in flat):
            return False
        for chunk in schedule.placement.chunks_of(rank):
            order = list(range(schedule.m))
            if [a.microbatch for a in flat if a.chunk == chunk and a.phase == "F"] != order:
                return False
            if [a.microbatch for a in flat if a.chunk == chunk and a.phase in ("I", "B")] != order:
                return False
            split = sorted(a.microbatch for a in flat if a.chunk == chunk and a.phase == "I")
            if sorted(a.microbatch for a in flat if a.chunk == chunk and a.phase == "W") != split:
                return False
    done: set[tuple[str, int, int]] = set()
    at = [0] * schedule.p

    def ready(action: Action) -> bool:
        c, j = action.chunk, action.microbatch
        if action.phase == "F":
            return c == 0 or ("F", c - 1, j) in done
        if action.phase == "W":
            return ("I", c, j) in done
        return ("F", c, j) in done and (c == last or ("I", c + 1, j) in done)

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while at[rank] < len(row) and all(ready(a) for a in parts(row[at[rank]])):
                for a in parts(row[at[rank]]):
                    done.add(("I" if a.phase == "B" else str(a.phase), a.chunk, a.microbatch))
                at[rank] += 1
                moved = True
    return all(i == len(row) for i, row in zip(at, schedule.actions, strict=True))


def accepted(schedule: Schedule) -> bool:
    try:
        S.check(schedule)
    except ScheduleError as error:
        assert len(str(error)) > 20 and ("rank" in str(error) or "lists" in str(error)), str(error)
        return False
    return True


@st.composite
def mutants(draw):
    name = draw(st.sampled_from(list(S.FAMILIES)))
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    one = S.build(name, p=p, m=m)
    rows = [list(row) for row in one.actions]
    kinds = ["swap", "drop", "duplicate", "move", "neighbours", "split", "renumber", "braid"]
    for _ in range(draw(st.integers(1, 2))):
        rank = draw(st.integers(0, p - 1))
        row = rows[rank]
        if not row:
            continue
        i, j = draw(st.integers(0, len(row) - 1)), draw(st.integers(0, len(row) - 1))
        match draw(st.sampled_from(kinds)):
            case "swap":
                row[i], row[j] = row[j], row[i]
            case "neighbours":
                k = min(i + 1, len(row) - 1)
                row[i], row[k] = row[k], row[i]
            case "drop":
                row.pop(i)
            case "duplicate":
                row.insert(j, row[i])
            case "move":
                rows[draw(st.integers(0, p - 1))].insert(j, row.pop(i))
            case "split":
                row[i : i + 1] = parts(row[i])[::-1]
            case "renumber":
                a, *rest = parts(row[i])
                b = Action(a.phase, a.chunk, draw(st.integers(0, m)))
                row[i] = Composite((b, *rest)) if rest else b
            case "braid":
                k = min(i + 1, len(row) - 1)
                if k > i and {len(parts(row[i])), len(parts(row[k]))} == {1}:
                    both = sorted((*parts(row[i]), *parts(row[k])), key=lambda a: "FIBW".index(a.phase))
                    if "".join(a.phase for a in both) in ("FF", "FB", "FI", "FW", "IW"):
                        row[i : k + 1] = [Composite(tuple(both))]
    return Schedule(one.name, one.placement, m, tuple(map(tuple, rows)))


@settings(max_examples=400, deadline=None)
@given(mutants())
def test_accepts_exactly_what_runs(mutant):
    assert accepted(mutant) == runs(mutant)


def test_mutations_of_every_kind_occur_on_both_sides():
    """The property above is not vacuous: of random swaps of neighbours, some stay valid and some don't."""
    rng, verdicts = random.Random(0), []
    for _ in range(300):
        one = S.build(rng.choice(list(S.FAMILIES)), p=rng.randint(1, 4), m=rng.randint(1, 12))
        rows = [list(row) for row in one.actions]
        row = rng.choice(rows)
        i = rng.randrange(len(row) - 1)
        row[i], row[i + 1] = row[i + 1], row[i]
        mutant = Schedule("x", one.placement, one.m, tuple(map(tuple, rows)))
        verdicts.append(accepted(mutant))
        assert verdicts[-1] == runs(mutant)
    assert 30 < sum(verdicts) < 270


def schedule_of(text: str, placement: Placement | None = None) -> Schedule:
    return Schedule.from_csv(text.replace(" ", ",").replace("/", "\n") + "\n", placement)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0 0B0/1F0", r"rank 1 never runs 1B0"),
        ("0F0 0I0/1F0 1B0", r"rank 0 runs 0I0 but never 0W0"),
        ("0F0 0B0 0W0/1F0 1B0", r"rank 0, step 2: 0W0 runs a second time"),
        ("0F0 0W0 0I0/1F0 1B0", r"0W0 comes before 0I0"),
        ("0B0 0F0/1F0 1B0", r"rank 0, step 0: 0B0 comes before 0F0"),
        ("0F1 0F0 0B0 0B1/1F0 1F1 1B0 1B1", r"0F1, but the next F of chunk 0 is that of micro-batch 0"),
        ("0F0 0F0 0B0/1F0 1B0", r"0F0 runs a second time"),
        ("0F0 0F1 0B1 0B0/1F0 1F1 1B0 1B1", r"next I or B of chunk 0 is that of micro-batch 0"),
        # rank 0 wants 0B0 before it gives 0F1, but rank 1 runs 1F1 before 1B0
        (
            "0F0 0B0 0F1 0B1/1F0 1F1 1B0 1B1",
            r"deadlock: rank \d stands at step \d .* which needs .* of rank \d",
        ),
    ],
)
def test_messages_name_rank_action_and_reason(text, says):
    with pytest.raises(ScheduleError, match=says):
        S.check(schedule_of(text))


def test_deadlock_names_the_whole_cycle():
    with pytest.raises(ScheduleError) as error:
        S.check(schedule_of("0F0 0B0 0F1 0B1/1F0 1F1 1B0 1B1"))
    text = str(error.value)
    assert "rank 0 stands at step 1 (0B0), which needs 1I0 (step 2 of rank 1)" in text
    assert "rank 1 stands at step 1 (1F1), which needs 0F1 (step 2 of rank 0)" in text


def test_wrong_rank_and_range():
    placement = Placement("loop", 2, 1)
    with pytest.raises(ScheduleError, match="rank 0, step 0: 1F0, but chunk 1 lies on rank 1"):
        S.check(schedule_of("1F0 1B0/0F0 0B0", placement))
    with pytest.raises(ScheduleError, match="there are 2 chunks"):
        S.check(schedule_of("7F0 0B0/0F0 0B0", placement))
    bad = Schedule("x", placement, 1, schedule_of("0F1 0B0/1F0 1B0", placement).actions)
    with pytest.raises(ScheduleError, match="outside of the 1 micro-batches"):
        S.check(bad)
    with pytest.raises(ScheduleError, match="1 lists for p=2"):
        S.check(Schedule("x", placement, 1, (bad.actions[0],)))


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("(0F0;1F0)OVERLAP_F_F 1B0 0B0", "0F0"),
        ("0F0 (1F0;1B0)OVERLAP_F_B 0B0", "1F0"),
        ("0F0 1F0 (1I0;1W0)OVERLAP_I_W 0B0", "1I0"),
    ],
)
def test_parts_of_a_composite_that_need_each_other(text, needed):
    with pytest.raises(ScheduleError, match=f"holds {needed} and what needs it"):
        S.check(schedule_of(text, Placement("v", 1, 2)))


def test_weight_of_another_microbatch_may_join():
    S.check(schedule_of("0F0 0F1 0F2 0I0 (0I1;0W0)OVERLAP_I_W (0I2;0W1)OVERLAP_I_W 0W2"))
    S.check(schedule_of("0F0 0F1 0I0 (0F2;0I1;0W0)OVERLAP_F_I_W (0I2;0W1)OVERLAP_I_W 0W2"))


def test_memory_limit():
    one = S.build("1f1b", p=4, m=8)
    S.check(one, max_live=4)
    with pytest.raises(ScheduleError, match="rank 0 holds 4 chunk activations at once, over the limit of 3"):
        S.check(one, max_live=3)


def test_big_schedules_are_checked():
    """p = 64, m = 1024, v = 2."""
    one = S.build("stp", p=64, m=1024)
    S.check(one)
