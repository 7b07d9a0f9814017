"""OUT/leaderboard.md, from the records alone."""

from pathlib import Path

from mini_ee.data.files import write_bytes


def write_page(out: Path, quick: bool) -> Path:
    """Write the page; returns its path."""
    from mini_ee.experiments.leaderboard.protocol import exams, methods, seed_count
    from mini_ee.experiments.leaderboard.runs import record_path
    from mini_ee.experiments.records import read_about

    lines = ["# The leaderboard", ""]
    for exam in exams(quick):
        for method in methods(quick):
            there = read_about(record_path(out, exam.name, method))
            lines.append(f"- {exam.name}, {method}: {len(there)} of {seed_count(quick)} seeds")
    path = out / "leaderboard.md"
    write_bytes(path, "\n".join([*lines, ""]).encode())
    return path
