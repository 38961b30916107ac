"""Results files: one JSON object a line, appended as each run ends; what is there already is not run again."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tptopk.experiments.recipes import PAPER, TABLES, Recipe, completed
from tptopk.experiments.reproduce import commit
from tptopk.privacy.chain import open_locked
from tptopk.privacy.methods import method_named
from tptopk.privacy.refusal import Refusal, check_number

Lines = dict[str, Any] | list[dict[str, Any]]
Run = Callable[[Recipe, str | None, str], Lines]  # (recipe, data folder, device) → a line, or several


@dataclass(frozen=True)
class Job:
    """One run that a results file is to have. Of several lines it has the last, alone, is filed under the recipe itself."""

    path: Path
    recipe: Recipe
    run: Run

    @property
    def without_name(self) -> tuple[Run, dict[str, Any]]:
        """What the outcome depends on: the table that asks for it is not part of it."""
        return self.run, {**self.recipe.identity(), "variant": ""}


def read_results(path: Path) -> list[dict[str, Any]]:
    """The finished runs of a file; a last line that was cut short is not one of them."""
    if not path.exists():
        return []
    if not path.is_file():
        raise Refusal(f"{path} is no file, and runs are kept in one; give --results another folder")
    found = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            result = json.loads(line)
        except json.JSONDecodeError as error:
            if number < len(lines) - 1:
                raise Refusal(f"line {number + 1} of {path} is not JSON: {error}") from error
            continue
        if not isinstance(result, dict) or not isinstance(result.get("recipe"), dict):
            raise Refusal(f"line {number + 1} of {path} is not a run: it has no recipe")
        if isinstance(result.get("accuracy"), (int, float)):
            check_number(f"the accuracy in line {number + 1} of {path}", result["accuracy"], least=0, most=100)
        found.append(result)
    return found


def pending(recipes: Iterable[Recipe], path: Path) -> list[Recipe]:
    done = [completed(result["recipe"]) for result in read_results(path)]
    return [r for r in recipes if r.identity() not in done]


def run_all(
    jobs: Sequence[Job],
    data_dir: str | None,
    device: str,
    on_result: Callable[[Job, dict[str, Any]], None],
    processes: int = 1,
) -> None:
    """Run what is not in its file yet, file by file, so many at a time, and append each run as it ends.

    A run that a table of the same folder has under another name, or that is under way for one, is taken from there.
    Meanwhile no other process runs what these files lack.
    """
    source = commit()  # as it is now, whatever is changed while runs go on
    wanted: list[Job] = []
    with ExitStack() as held:
        for path in dict.fromkeys(job.path for job in jobs):
            _prepare(path)
            of_file = {job.recipe: job for job in jobs if job.path == path}
            if pending(of_file, path):
                held.callback(os.close, open_locked(path, os.O_CREAT))
                # asked again: another process may have ended some before the file was this one's
                wanted += sorted((of_file[r] for r in pending(of_file, path)), key=_kinship)
        _run(wanted, data_dir, device, on_result, processes, source)


def _run(
    wanted: list[Job],
    data_dir: str | None,
    device: str,
    on_result: Callable[[Job, dict[str, Any]], None],
    processes: int,
    source: str | None,
) -> None:
    finished = {folder: _of_all_tables(folder) for folder in {job.path.parent for job in wanted}}

    def keep(job: Job, found: Lines) -> None:
        lines = found if isinstance(found, list) else [found]
        lines = sorted(lines, key=lambda line: line["recipe"] == job.recipe.identity())
        try:
            with job.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:
            raise Refusal(f"cannot write to {job.path}: {error.strerror}; runs that are in it are kept") from error
        finished[job.path.parent] += [{**line, "taken_from": job.path.name} for line in lines]
        on_result(job, lines[-1])

    queued: list[Job] = []
    same: list[Job] = []  # as one that is queued, but for the name
    for job in wanted:
        if taken := _taken_from(finished[job.path.parent], job.recipe):
            keep(job, taken)
        elif job.recipe.variant != PAPER and job.without_name in (other.without_name for other in queued):
            same.append(job)
        else:
            queued.append(job)
    for job, found in _outcomes(queued, data_dir, device, processes, source):
        keep(job, [{**line, "processes": processes} for line in (found if isinstance(found, list) else [found])])
    for job in same:
        taken = _taken_from(finished[job.path.parent], job.recipe)
        assert taken is not None, "what it waited for has ended"
        keep(job, taken)


def _outcomes(
    jobs: list[Job], data_dir: str | None, device: str, processes: int, source: str | None
) -> Iterator[tuple[Job, Lines]]:
    """Each job with its lines, as it ends."""
    if processes == 1 or len(jobs) < 2:
        yield from ((job, _announced(job.run, job.recipe, data_dir, device)) for job in jobs)
        return
    threads, others = max(1, (os.cpu_count() or 1) // processes), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(processes, len(jobs)), multiprocessing.get_context("spawn"), initializer=_begin, initargs=(threads, source)
    )
    try:
        # An interrupt is this process's to act on: those that are started now keep it blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        running = {pool.submit(_announced, job.run, job.recipe, data_dir, device): job for job in jobs}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for ended in as_completed(running):
            yield running[ended], ended.result()
    except BrokenProcessPool as error:
        raise Refusal(
            "one of the processes was killed, most likely for want of memory: give fewer --processes; finished runs are kept"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
            process.join()


def _announced(run: Run, r: Recipe, data_dir: str | None, device: str) -> Lines:
    """On a CPU a run takes minutes."""
    print(
        f"running: {r.dataset} {r.method} ε = {r.target_epsilon:g} {r.variant} seed {r.seed}",
        file=sys.stderr,
        flush=True,
    )
    return run(r, data_dir, device)


def _begin(threads: int, source: str | None) -> None:
    """Processors are shared out; the source is that of the first process, which none outlives."""
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    os.environ |= {"TPTOPK_COMMIT": source} if source else {}
    torch.set_num_threads(threads)


def _end_with_the_first() -> None:
    """However that ends: killed, it tells nobody."""
    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    os._exit(1)


def _of_all_tables(folder: Path) -> list[dict[str, Any]]:
    """The runs of all tables' files in a folder, each with the name of its file."""
    return [{**run, "taken_from": f"{name}.jsonl"} for name in TABLES for run in read_results(folder / f"{name}.jsonl")]


def _taken_from(finished: list[dict[str, Any]], r: Recipe) -> dict[str, Any] | None:
    """The same run, to the seed, under another name; it takes no time again.

    The main table's own runs are never taken: they keep what advice would have been given.
    """
    for run in finished if r.variant != PAPER else ():
        if {**completed(run["recipe"]), "variant": r.variant} == r.identity():
            return {**run, "variant": r.variant, "recipe": r.identity(), "seconds": 0.0}
    return None


def _kinship(job: Job) -> tuple[Any, ...]:
    """Neighbours share data and plans."""
    r = job.recipe
    seen = (r.dataset, r.views, r.shift, r.records or 0, r.held_out)
    return *seen, r.target_epsilon, method_named(r.method).warmup, r.epochs


def _prepare(path: Path) -> None:
    """Make the file's folder; end a last line that lacks its end, or cut it off if it was never finished."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(
            f"cannot keep runs in {path.parent}: {error.strerror}; give --results FOLDER, one that can be written to"
        ) from error
    if path.is_file() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        whole = content.rfind(b"\n") + 1
        try:
            json.loads(content[whole:])
        except ValueError:
            os.truncate(path, whole)
        else:
            with path.open("ab") as file:
                file.write(b"\n")
