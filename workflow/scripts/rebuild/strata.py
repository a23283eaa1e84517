"""A sample that has the proportions of the whole, without chance: how much each part gives, and which of its members."""


def share_out(rows: dict[str, int], size: int) -> dict[str, int]:
    """Return how many of `size` prompts each source gives, those that give none left out.

    In proportion to its rows by largest remainder; of equals the first one is served. Where there are no more sources
    than prompts to give, each gives one at least, at the cost of those that are furthest above their proportion.
    """
    total, least = sum(rows.values()), int(len(rows) <= size)
    given = {name: max(least, size * count // total) for name, count in rows.items()}

    def owed(name: str) -> int:
        return size * rows[name] - total * given[name]

    missing = size - sum(given.values())
    for name in sorted(rows, key=owed, reverse=True)[: max(0, missing)]:
        given[name] += 1
    for _ in range(-missing):
        given[min((name for name in rows if given[name] > 1), key=owed)] -= 1
    return {name: count for name, count in given.items() if count}


def spread(length: int, count: int, place: int, places: int) -> list[int]:
    """Return `count` different positions below `length`, at even distances.

    The first one lies (place + 1/2) / places of a distance from the start, so that sources that give one prompt each
    give short and long ones between them.
    """
    steps = range(2 * place + 1, 2 * places * count, 2 * places)
    return [step * length // (2 * places * count) for step in steps]
