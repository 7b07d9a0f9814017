"""Rows as a text table."""


def table(rows: list[dict], columns: dict[str, str]) -> str:
    """A text table with numbers aligned to the right. columns: key -> heading, or heading:format like `accuracy:.3f`.

    >>> print(table([{"layer": 2, "accuracy": 0.5}], {"layer": "layer", "accuracy": "accuracy:.2f"}))
    layer  accuracy
        2      0.50
    """
    headings = {key: heading.partition(":")[::2] for key, heading in columns.items()}
    cells = [[name for name, _ in headings.values()]]
    for row in rows:
        cells.append([format(row[key], spec) if spec else str(row[key]) for key, (_, spec) in headings.items()])
    widths = [max(map(len, column)) for column in zip(*cells)]
    numeric = [all(not isinstance(row[key], str) for row in rows) for key in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(line, widths, numeric)
        ).rstrip()
        for line in cells
    )
