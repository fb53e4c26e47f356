"""What a phase's load, step time and KV bytes say of a GPU, in words.

`SM %` is the part of the time in which some kernel ran. One program of one kernel counts like a full GPU, so
99 % of it is compatible with a device that does nothing. What cannot be faked is bytes moved and power drawn.
"""

from __future__ import annotations

from sglang_ddtree_patch.launch.probe.gpu_sampler import Load

WORKS = "works"
HIDES_IDLE = "idle behind its SM %"
WAITS = "waits for the host"
PARTLY = "partly used"
UNKNOWN = "no verdict"

BUSY_SM = 90.0  # %
WAITING_SM = 60.0
# Any one of these is work; below all of the second ones there is none.
BUSY_MEMORY, IDLE_MEMORY = 50.0, 25.0  # % of the time
BUSY_POWER, IDLE_POWER = 0.7, 0.5  # of the limit
BUSY_FRACTION, IDLE_FRACTION = 0.4, 0.1  # of the copy rate


def judge(load: Load | None, fraction: float | None) -> tuple[str, str]:
    """A verdict and its reason.

    fraction: of the device's copy rate at which KV is read, weights left out; None where it is not known.
    """
    power = None
    if load is not None and load.power_watts is not None and load.power_limit_watts:
        power = load.power_watts / load.power_limit_watts
    signs = [
        (None if load is None else load.memory_percent, BUSY_MEMORY, IDLE_MEMORY),
        (power, BUSY_POWER, IDLE_POWER),
        (fraction, BUSY_FRACTION, IDLE_FRACTION),
    ]
    known = [(value, busy, idle) for value, busy, idle in signs if value is not None]
    because = reason(load, fraction)
    sm = None if load is None else load.sm_percent
    if sm is not None and sm < WAITING_SM:
        return WAITS, f"{because}: no kernel runs most of the time"
    if not known:
        return UNKNOWN, f"{because}; memory, power or KV at a share of the copy rate would tell"
    if any(value >= busy for value, busy, _ in known):
        return WORKS, because
    if all(value < idle for value, _, idle in known):
        if sm is not None and sm >= BUSY_SM:
            return HIDES_IDLE, f"{because}: a kernel is always there, and the GPU does next to nothing"
        return PARTLY, f"{because}: little of what the GPU can do"
    return PARTLY, because


def reason(load: Load | None, fraction: float | None) -> str:
    """The figures that there are."""
    parts = []
    if load is not None:
        if load.sm_percent is not None:
            parts.append(f"SM {load.sm_percent:.0f} %")
        if load.memory_percent is not None:
            parts.append(f"memory controller {load.memory_percent:.0f} %")
        if load.power_watts is not None:
            limit = f" of {load.power_limit_watts:.0f}" if load.power_limit_watts else ""
            parts.append(f"{load.power_watts:.0f}{limit} W")
    if fraction is not None:
        parts.append(f"KV at {fraction:.1%} of the copy rate")
    return ", ".join(parts) or "nothing is known of it"
