"""results/add-exits.md is written from its JSON, measured or made up, and its figures are those of the cases."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BAD, GOOD, THINGS

from mini_ee.experiments.measured import add_exits_guarantee, make_page
from mini_ee.experiments.measured.add_exits_cases import stored
from mini_ee.experiments.measured.add_exits_guarantee import summary
from mini_ee.experiments.measured.add_exits_page import PARTS, models_rows
from mini_ee.experiments.measured.command import peak_memory
from mini_ee.experiments.measured.fine_tuning import FineTuned
from mini_ee.experiments.pages import spread
from mini_ee.lab.data.files import write_json
from mini_ee.lab.data.tasks import Task

RESULTS = Path(__file__).parents[2] / "results"


def case(task="SST-2", seed=0, saved=0.4, agreement=0.99, exits=(2, 6), **other) -> dict:
    """A measured case."""
    return {
        **{"task": task, "model": "MiniLM", "seed": seed, "wanted": 1000, "texts": 1000, "exits": list(exits)},
        **{"pays": True, "guaranteed": seed == 0, "agreement": agreement, "score": 0.9, "score_with_exits": 0.88},
        **{"layers_saved": saved, "time": 1 - saved, "processor_minutes": 2.0, "fine_tuning_minutes": 3.0},
        **{"examples": 400, "not_exited": 10, "largest_difference": 2e-6, "curve": [[0.1, 1.0, 0.1], [0.5, 0.95, 0.4]]},
        **other,
    }


def shifted(task: str, agreement: float, tighten: bool = False) -> dict:
    """The answers of a server, which reports an agreement from .9 to .98."""
    ends = {"agreement end low": 0.9, "agreement end mean": 0.95, "agreement end high": 0.98}
    shares = {"served_agreement": agreement, "served_saved": agreement}
    metrics = ends | {"exit_drift": 0.2, "tightened_total": 0.0}
    return {"task": task, "tighten": tighten, "metrics": metrics} | shares


FIGURES = {
    "models": [case(), case(seed=1, saved=0.5), case(wanted=3000, texts=3000), case("TREC", pays=False, saved=0.0)],
    "larger": [case(model="MPNet", agreement=0.97), case("TREC", model="MPNet", saved=0.6)],
    "memory": [{"model": "MiniLM", "texts": count, "peak_mb": mb} for count, mb in ((1000, 700), (10_000, 1234))],
    "exit-0": [case(), case(saved=0.5, exits=(0, 2, 6))],
    "same-labels": {"task": "SST-2", "model": "MiniLM", "texts": 1000, "never": 1000, "chosen": 993},
    "guarantee": {
        **{"pool": 12_000, "drawn": 1500, "repetitions": 2},
        "levels": [
            summary(
                [{"level": 0.99, "planted": planted, "guaranteed": True, "agreement": at, "saved": 0.3} for at in two]
            )
            for planted, two in ((None, (0.992, 0.995)), ("no test", (0.98, 0.995)))
        ],
    },
    "shift": [shifted("SST-2", 0.96), shifted("MR", 0.91), shifted("TREC", 0.85), shifted("TREC", 0.99, True)],
    "one-file": {
        **{"exits": [{"layer": 6, "share": 6 / 22, "time": 0.32, "ms": 80.0}], "full_ms": 250.0, "plain_ms": 249.0},
        "tokens": 128,
    },
    "measured": {
        part: {"processor": "A processor", "machine": "x86_64, 2 cores", "torch": "2", "commit": "c0"}
        | {"core_hours": 0.5, "data": {"TREC": "abc"}}
        for part in PARTS
    },
}


def test_a_page_with_pictures_is_written_from_a_json_with_all_parts(tmp_path):
    write_json(tmp_path / "add-exits.json", FIGURES)
    assert make_page("add-exits", out=tmp_path)["page"]
    text = (tmp_path / "add-exits.md").read_text()
    assert "SST-2 | MiniLM | 1,000 | 2 | 99.0 ± 0.0 |" in text and "45.0 ± 7.1 |" in text and "1 of 2 |" in text
    assert "| 99%, no test | 2 of 2 | 1 |" in text
    words = " ".join(text.split())
    assert "saves 45% to 45% of the layers on SST-2**" in words and "not worth it on TREC, and exports nothing" in words
    assert "change by more than 2.0 points" in words and "at most 1,234 MB for 10,000 texts" in words
    assert "saves 40% to 60% of its layers**, by task, and takes 40% to 60% of its time." in words
    assert "The lowest agreement of its 2 calls is 97.0%, on SST-2." in words
    assert "by at most 2.0e-06" in words and "1,000 of 1,000 labels equal those" in words and "on 993." in words
    assert "400 of SST-2, 400 of TREC." in words
    end = text.partition("How each part was measured")[2]
    assert "| one-file | 0.5 | A processor | x86_64, 2 cores | 2 | c0 |\n" in end
    assert "- Checksum (sha256) of TREC: abc (of a folder" in end
    assert (tmp_path / "add-exits.png").exists() and (tmp_path / "add-exits-texts.png").exists()


@pytest.mark.slow
def test_a_repetition_on_known_states_is_that_of_the_command(classifier_folder, tmp_path, monkeypatch):
    texts = [(f"{'very ' * n}the {thing} was {word}",) for n in range(4) for thing in THINGS for word in GOOD + BAD]
    task = Task("pool", ("bad", "good"), ("accuracy",), {})
    pool = add_exits_guarantee.Pool(FineTuned(classifier_folder, texts, None, task, None))
    monkeypatch.setattr(add_exits_guarantee, "DRAWN", 90)
    monkeypatch.setattr(add_exits_guarantee, "LEVELS", (0.9, 0.6))
    known = add_exits_guarantee.repetition(pool, tmp_path / "known", 3)
    read = []
    monkeypatch.setattr(pool, "states_of", lambda *given: read.append(given) or add_exits_guarantee.STATES(*given))
    assert add_exits_guarantee.repetition(pool, tmp_path / "read", 3) == known and read
    levels = [(level["level"], level["planted"]) for level in known["levels"]]
    assert levels == [(0.9, None), (0.6, None), (0.9, "no test"), (0.6, "no test")]
    assert min(level["agreement"] for level in known["levels"]) < 1 and known["seed"] == 3


def test_the_peak_of_a_process_is_its_own():
    ballast = bytearray(300 * 2**20)
    peak, code = 0.0, "import sys; x = bytearray(50 * 2**20); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE) as process:
        while peak < 50:
            peak = max(peak, peak_memory(process.pid))
        process.communicate(b"")
    assert 50 <= peak < 150 and len(ballast) and peak_memory(process.pid) == 0


def test_a_figure_of_one_seed_has_no_spread():
    assert spread([0.01]) == "1.0" and spread([1.0, 3.0], scale=1) == "2.0 ± 1.4"
    assert models_rows([case("TREC"), case("SST-2")])[0][0] == "SST-2"


def test_a_guarantee_is_violated_if_it_is_given_and_the_agreement_is_lower():
    rows = [
        {"level": 0.99, "planted": None, "guaranteed": given, "agreement": agreement, "saved": 0.5}
        for given, agreement in ((True, 0.995), (True, 0.985), (False, 0.9))
    ]
    counts = summary(rows)
    assert (counts["guaranteed"], counts["broken"], counts["least"], counts["agreement"]) == (2, 1, 0.985, 0.99)
    assert summary(rows[2:])["agreement"] is None


def test_a_stored_case_is_not_measured_again(tmp_path):
    assert stored(tmp_path, "SST-2 MiniLM 0", lambda: {"x": 1}) == {"x": 1}
    assert stored(tmp_path, "SST-2 MiniLM 0", lambda: {"x": 2}) == {"x": 1}
