"""Share the links of a network among flows, max-min fair: what many TCP connections come to in the long run."""

from __future__ import annotations

from collections.abc import Sequence


def fair_rates(flows: Sequence[Sequence[int]], capacities: Sequence[float]) -> list[float]:
    """Return the rate of each flow, such that none can be raised without lowering another that is as slow or slower.

    Progressive filling: all rates rise together until a link is full; its flows keep their rate, and the others rise on.

    Args:
        flows: the links that each flow crosses, at least one, none of them twice.
        capacities: of each link, more than 0, in bits per second; rates are in the same unit.

    Source: Bertsekas and Gallager, "Data Networks", second edition, section 6.5.2.

    >>> fair_rates([(0, 1), (0, 2), (1,)], capacities=[10.0, 4.0, 100.0])
    [2.0, 8.0, 2.0]
    """
    through: dict[int, list[int]] = {}
    for number, links in enumerate(flows):
        for link in links:
            through.setdefault(link, []).append(number)
    left = {link: capacities[link] for link in through}
    rising = {link: len(numbers) for link, numbers in through.items()}
    rates: list[float | None] = [None] * len(flows)
    while rising:
        full = min(rising, key=lambda link: left[link] / rising[link])
        rate = left[full] / rising[full]
        for number in through[full]:
            if rates[number] is not None:
                continue
            rates[number] = rate
            for link in flows[number]:
                left[link] = max(0.0, left[link] - rate)
                rising[link] -= 1
                if not rising[link]:
                    del rising[link]
    return [rate for rate in rates if rate is not None]
