"""What `optimizer.layers()` and `print(optimizer)` show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mkor.engine import Engine
from mkor.methods.base import EVENTS

FAULTS = ("skipped", "resets", "rejected", "bounded", "mismatched")
"""Events that a sound training has none of."""


@dataclass(frozen=True)
class LayerInfo:
    """One layer or module as the optimizer sees it.

    Attributes:
        name: Module path without the prefixes of wrappers; attention has one name a projection.
        kind: Class of the module.
        shape: Shape of the weight.
        preconditioned: Whether its gradient is preconditioned.
        reason: Why not, or which side has no factor; None where there is nothing to say.
        bytes: Bytes of curvature state on this worker, also before the first update allocates it; 0
            for a layer that other workers hold, whose counters below are theirs.
        updates: Number of factor updates.
        last_update: Step of the last one, None before.
        skipped: Statistics left out as not finite.
        resets: Factors reset to the identity.
        blends: Times the stabiliser acted.
        rejected: Inverses or pairs that could not be used, so that the last one stayed.
        damped: Pairs that damping changed.
        bounded: Statistics far larger than their average, which entered it by a part.
        mismatched: Second passes that saw another batch than the first, and were left out.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    preconditioned: bool
    reason: str | None
    bytes: int = 0
    updates: int = 0
    last_update: int | None = None
    skipped: int = 0
    resets: int = 0
    blends: int = 0
    rejected: int = 0
    damped: int = 0
    bounded: int = 0
    mismatched: int = 0


def layer_infos(engine: Engine) -> list[LayerInfo]:
    """Records of the preconditioned layers, then of the modules left to the base optimizer."""
    infos = [preconditioned(engine, name) for name in engine.layers]
    if engine.resting is not None:
        reason = f"handed over to the base optimizer after {engine.resting} steps"
        infos = [replace(info, preconditioned=False, reason=reason, bytes=0) for info in infos]
    if engine.paused:
        reason = "left to the base optimizer while it is on trial"
        infos = [replace(info, preconditioned=False, reason=reason) for info in infos]
    left = [LayerInfo(m.name, m.kind, m.shape, False, m.reason) for m in engine.left]
    return infos + left


def faults_of(infos: Iterable[LayerInfo]) -> dict[str, dict[str, int]]:
    """What was left out, reset or rejected, by layer."""
    return {i.name: {key: getattr(i, key) for key in FAULTS} for i in infos if i.updates}


def preconditioned(engine: Engine, name: str) -> LayerInfo:
    """The record of one layer; reads its counters, which synchronises with its device."""
    view, record = engine.layers[name].view, engine.records[name]
    size = sum(t.numel() * t.element_size() for t in record.state.values())
    events = record.state["events"].tolist() if record.state else [0] * len(EVENTS)
    frozen = not view.weight.requires_grad
    sides = engine.method.sides(view.shape)
    one_sided = (
        f"{'inputs' if sides[0] else 'outputs'} side without factor: {engine.method.limit()}"
    )
    reason = "frozen" if frozen else None if all(sides) else one_sided
    return LayerInfo(
        name,
        view.kind,
        tuple(view.weight.shape),
        not frozen,
        reason,
        size or engine.ownership.holds(name) * engine.method.bytes(view.shape, view.weight.dtype),
        record.updates,
        record.last_update,
        **dict(zip(EVENTS, events, strict=True)),
    )


def table(title: str, infos: Iterable[LayerInfo], most: int = 12) -> str:
    """A short table: the preconditioned layers up to `most`, then counts of reasons."""
    infos = list(infos)
    rows = [i for i in infos if i.preconditioned]
    size = sum(i.bytes for i in rows) / 2**10
    memory = f"{size / 2**10:.1f} MiB" if size >= 2**10 else f"{size:.1f} KiB"
    plural = "" if len(rows) == 1 else "s"
    lines = [f"{title}: {len(rows)} layer{plural} preconditioned, {memory} of factors"]
    width = max((len(i.name) for i in rows[:most]), default=0)
    for info in rows[:most]:
        shape = "x".join(map(str, info.shape))
        counts = {key: getattr(info, key) for key in FAULTS}
        events = "".join(f"  {count} {key}" for key, count in counts.items() if count)
        lines.append(
            f"  {info.name:<{width}}  {info.kind}  {shape}  {info.updates} updates{events}"
        )
    if len(rows) > most:
        lines.append(f"  … and {len(rows) - most} more, see layers()")
    reasons = Counter(info.reason for info in infos if not info.preconditioned)
    lines += [f"  base optimizer only: {count} x {reason}" for reason, count in reasons.items()]
    return "\n".join(lines)
