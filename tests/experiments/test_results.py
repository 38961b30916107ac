"""Results files: appended to, continued, never run twice, by one process or several."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tptopk.experiments import recipes
from tptopk.experiments.results import Job, pending, read_results, run_all
from tptopk.privacy.refusal import Refusal

RECIPES = [recipes.quick_recipe("mnist", "dp-sgd", 1.0, seed) for seed in (0, 1, 2)]


def line(r: recipes.Recipe, **more: object) -> str:
    return json.dumps({"recipe": r.identity(), **more}) + "\n"


def run_each(wanted, path, run, on_result=lambda job, result: None, **options):
    run_all([Job(path, r, run) for r in wanted], None, "cpu", on_result, **options)


@pytest.fixture
def ran():
    return []


@pytest.fixture
def run(ran):
    def run(r, data_dir, device):
        ran.append(r)
        return {"recipe": r.identity()}

    return run


def test_finished_runs_are_not_run_again_and_others_are_appended(tmp_path, run, ran):
    path = tmp_path / "new" / "main.jsonl"
    run_each(RECIPES[:2], path, run)
    run_each(RECIPES, path, run)
    assert ran == RECIPES
    assert [result["recipe"]["seed"] for result in read_results(path)] == [0, 1, 2]


def test_a_file_that_lacks_runs_has_one_writer_at_a_time(tmp_path, run, ran):
    path = tmp_path / "main.jsonl"

    def meanwhile(r, data_dir, device):
        with pytest.raises(Refusal, match="another process is writing"):
            run_each(RECIPES, path, run)
        return {"recipe": r.identity()}

    run_each(RECIPES[:1], path, meanwhile)
    assert not ran and len(read_results(path)) == 1
    run_each(RECIPES[:2], path, run)
    assert ran == RECIPES[1:2]


def test_a_place_that_cannot_be_written_to_is_refused_in_words(tmp_path, run, monkeypatch):
    (tmp_path / "main.jsonl").mkdir()
    with pytest.raises(Refusal, match="is no file, and runs are kept in one"):
        run_each(RECIPES[:1], tmp_path / "main.jsonl", run)

    def full(self, mode="r", **options):
        if mode == "a":
            raise OSError(28, "No space left on device")
        return opened(self, mode, **options)

    opened = Path.open
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(Refusal, match="No space left on device; runs that are in it are kept"):
        run_each(RECIPES[:1], tmp_path / "other" / "main.jsonl", run)


@pytest.mark.parametrize("cut", [1, 20, 300])
def test_a_half_written_last_line_is_cut_off_and_run_again(tmp_path, cut, run, ran):
    path = tmp_path / "main.jsonl"
    path.write_text(line(RECIPES[0]) + line(RECIPES[1])[:-cut])
    kept = 2 if cut == 1 else 1  # without its end of line it is still whole
    assert len(read_results(path)) == kept
    run_each(RECIPES[:2], path, run)
    assert ran == RECIPES[kept:2]
    assert path.read_text().startswith(line(RECIPES[0])) and path.read_text().endswith("\n")
    assert [result["recipe"] for result in read_results(path)] == [r.identity() for r in RECIPES[:2]]


def test_a_run_that_was_cut_between_its_lines_is_not_finished(tmp_path):
    path = tmp_path / "diagnostics.jsonl"

    def run(r, data_dir, device):
        return [{"recipe": {**r.identity(), "score": score}} for score in ("paper", "factored")]

    run_each(RECIPES[:1], path, run)
    assert not pending(RECIPES[:1], path)
    whole = path.read_text()
    path.write_text(whole[: len(whole) - 10])
    assert pending(RECIPES[:1], path) == RECIPES[:1]


def test_a_run_from_before_a_setting_existed_counts_as_run_with_its_default(tmp_path):
    path, old = tmp_path / "main.jsonl", RECIPES[0].identity()
    assert old.pop("annealed") is False
    path.write_text(json.dumps({"recipe": old}) + "\n")
    assert pending([RECIPES[0], replace(RECIPES[0], annealed=True)], path) == [replace(RECIPES[0], annealed=True)]


def test_blank_lines_are_nothing(tmp_path):
    path = tmp_path / "main.jsonl"
    path.write_text(line(RECIPES[0]) + "\n" + line(RECIPES[1]) + "\n\n")
    assert len(read_results(path)) == 2


def test_an_accuracy_that_is_none_is_refused(tmp_path):
    path = tmp_path / "main.jsonl"
    for wrong in (float("nan"), 1e9):
        path.write_text(line(RECIPES[0], accuracy=97.5) + line(RECIPES[1], accuracy=wrong))
        with pytest.raises(Refusal, match="the accuracy in line 2"):
            read_results(path)


@pytest.mark.parametrize("bad", ['{"recipe": {"seed"', "[1, 2]", '{"accuracy": 3}'])
def test_a_spoilt_line_before_the_last_is_named(tmp_path, bad):
    path = tmp_path / "main.jsonl"
    path.write_text(line(RECIPES[0]) + bad + "\n" + line(RECIPES[1]))
    with pytest.raises(Refusal, match=r"line 2 of .*main.jsonl is not"):
        read_results(path)


def test_a_run_that_another_table_has_is_taken_from_there(tmp_path, run, ran):
    shown = []
    (tmp_path / "main.jsonl").write_text(line(RECIPES[0]))
    twin = replace(RECIPES[0], variant="ρ = 1")
    other = replace(twin, seed=RECIPES[0].seed + 7)
    path = tmp_path / "ratio.jsonl"
    run_each([twin, other], path, run, lambda job, result: shown.append(result))
    found = read_results(path)
    assert ran == [other] and {result["recipe"]["variant"] for result in found} == {"ρ = 1"} and len(shown) == 2
    taken = next(result for result in found if "taken_from" in result)
    assert taken["taken_from"] == "main.jsonl" and taken["seconds"] == 0 and taken["recipe"] == twin.identity()
    assert not pending([twin, other], path)


def test_a_run_that_two_tables_want_is_run_once(tmp_path, run, ran):
    twin = replace(RECIPES[0], variant="ρ = 1")
    main, ratio = tmp_path / "main.jsonl", tmp_path / "ratio.jsonl"
    run_all([Job(main, RECIPES[0], run), Job(ratio, twin, run)], None, "cpu", lambda job, result: None)
    assert ran == RECIPES[:1]
    assert [result["taken_from"] for result in read_results(ratio)] == ["main.jsonl"]
    assert not pending([twin], ratio)


def where(r, data_dir, device):
    """For other processes, which find it by its name."""
    time.sleep(0.1 * r.seed)
    return {"recipe": r.identity(), "process": os.getpid(), "commit": os.environ.get("TPTOPK_COMMIT")}


def refuse_the_second(r, data_dir, device):
    if r.seed == 1:
        raise Refusal("not this one")
    return {"recipe": r.identity()}


def die(r, data_dir, device):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_several_processes_run_each_recipe_once(tmp_path):
    path, shown = tmp_path / "main.jsonl", []
    run_each(RECIPES, path, where, lambda job, result: shown.append(job.recipe), processes=2)
    found = read_results(path)
    assert {result["recipe"]["seed"] for result in found} == {0, 1, 2} and len(found) == len(shown) == 3
    assert os.getpid() not in {result["process"] for result in found} and {r["processes"] for r in found} == {2}
    run_each(RECIPES, path, die, processes=2)  # there already


@pytest.mark.slow
@pytest.mark.parametrize("bad, message", [(refuse_the_second, "not this one"), (die, "give fewer --processes")])
def test_what_goes_wrong_in_a_process_ends_all_and_keeps_what_was_finished(tmp_path, bad, message):
    path = tmp_path / "main.jsonl"
    with pytest.raises(Refusal, match=message):
        run_each(RECIPES[:2], path, bad, processes=2)
    assert [result["recipe"]["seed"] for result in read_results(path)] in ([], [0])


INTERRUPTED = """
from pathlib import Path
import os, signal, sys, time
from tests.experiments.test_results import RECIPES, run_each
def forever(r, data_dir, device):
    if r.seed:
        time.sleep(600)
    return {"recipe": r.identity(), "process": os.getpid()}
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores interrupts
    run_each(RECIPES, Path(sys.argv[1]), forever, lambda job, result: print(result["process"], flush=True), processes=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_an_interrupted_or_killed_command_and_what_was_finished_is_kept(tmp_path, end):
    script, path = tmp_path / "script.py", tmp_path / "main.jsonl"
    script.write_text(INTERRUPTED)
    here = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, str(script), str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(here)}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    worker = int(process.stdout.readline())  # one run has ended
    if end == signal.SIGINT:
        os.killpg(process.pid, end)  # as a terminal sends it
    else:
        process.send_signal(end)
    _, error = process.communicate(timeout=60)  # comes back when the last process has let go of the output
    assert process.returncode != 0 and error.count("Traceback") <= 1, error
    assert [result["recipe"]["seed"] for result in read_results(path)] == [0]
    if end == signal.SIGINT:  # it has been waited for; nobody waits for those of a killed command
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
