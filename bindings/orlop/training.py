"""The loop behind `orlop finetune`: data, engine, checkpoints, evaluation, export."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from . import _orlop
from .config import RunConfig
from .data.prepare import PreparedData, prepare
from .engine_config import batch_config, engine_config, total_steps
from .errors import DoesNotFitError, Error, InvalidDataError, IoError, UsageError
from .launch import stop_signals
from .metrics import MetricsLog, NoMetrics, StepRecorder, first_eval_loss
from .progress import NoProgress, Progress, format_bytes, print_line
from .text_files import read_json_object, replace_text

INTERRUPTED = 130  # exit code after a run that a signal ended and that saved its state

# What the engine throws, on all ranks alike, before it touches a state; after any other error states may be half
# updated.
_BEFORE_ANY_UPDATE = (DoesNotFitError, InvalidDataError)

# Of a checkpoint's user state: what a resumed run must share for its data to go on where it stopped.
_DATA_KEYS = ("data_key", "seq_len", "seed")


@dataclass(frozen=True)
class RunResult:
    """steps: optimizer steps done, those before a resumption too. loss_before, loss_after: on held-out text, in nats
    per token; None without such text, and loss_after, like export_dir, after a signal."""

    exit_code: int
    steps: int
    loss_before: float | None
    loss_after: float | None
    export_dir: Path | None


class StopRequest:
    """The first of the stop_signals() asks the loop to stop after its step; a second SIGINT or SIGTERM acts at once.
    SIGHUP does not: the end of a terminal sends it once by the shell and once by the kernel."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore(signal.SIGINT, signal.SIGTERM)

    def _restore(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            if number in self._previous:
                signal.signal(number, self._previous.pop(number))

    def __enter__(self) -> StopRequest:
        for number in stop_signals():
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._restore(*self._previous)


@contextmanager
def locked_run_dir(path: Path) -> Iterator[Path]:
    """Creates the run folder and holds it, so that two runs never write into one; freed by the kernel."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise IoError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{path}: another run is writing into this folder") from None
        yield path
    finally:
        os.close(handle)


def is_model_folder(path: Path) -> bool:
    try:
        return "model_type" in read_json_object(path / "config.json")
    except InvalidDataError:
        return False


def check_folders(config: RunConfig) -> None:
    """A run writes beside what it reads: neither over a model, nor among its data."""
    output = Path(config.output).resolve()
    if is_model_folder(output):
        raise UsageError(
            f"--output {config.output}: is the folder of a model, whose config.json the run would replace; give another "
            "--output"
        )
    if config.export and Path(config.model).resolve() == (output / "hf").resolve():
        raise UsageError(
            f"--model {config.model}: is where the run would export to; give another --output, or --export false"
        )
    for path in (*config.data, *(config.eval_data or ())):
        if Path(path).is_dir() and (output / "data").is_relative_to(Path(path).resolve()):
            raise UsageError(
                f"--data {path}: is where the run writes (into {config.output}), so that it would read its own files "
                "when it resumes; give another --output"
            )


def find_checkpoint(resume: str, run_dir: Path) -> str:
    """The step-N folder to go on from, or "" to start anew."""
    latest = _orlop.Engine.latest_checkpoint(str(run_dir))
    if resume == "auto":
        return latest
    if resume == "must":
        if not latest:
            raise UsageError(f"--resume must: {run_dir} holds no complete checkpoint")
        return latest
    if resume == "never":
        if latest:
            raise UsageError(
                f"--resume never: {run_dir} holds {Path(latest).name} already; a second run would mix with "
                "it. Choose another --output or remove the folder"
            )
        return ""
    if not Path(resume).is_dir():
        raise UsageError(f"--resume {resume}: neither auto, must, never nor a checkpoint folder")
    return resume


def other_checkpoints(run_dir: Path, checkpoint: str) -> str:
    """The complete ones beside this one, as --resume takes them, the last step first."""
    found = {path.parent for path in run_dir.glob("step-*/manifest.json")} - {Path(checkpoint)}
    return " or ".join(map(str, sorted(found, key=lambda path: (len(path.name), path.name), reverse=True)))


def micro_batches(config: RunConfig, data: PreparedData) -> list[_orlop.MicroBatch]:
    """Every row of the file once, in order; rows that fill the last micro-batch carry no label."""
    loader = _orlop.DataLoader(str(data.path), batch_config(config), seed=0, shuffle=False)
    rows = loader.rows_per_epoch()
    batches = []
    for first_row in range(0, rows, config.micro_batch):
        batch = loader.next()
        batch.labels[(rows - first_row) * config.seq_len :] = _orlop.IGNORED_LABEL
        batches.append(batch)
    return batches


def has_labels(batch: _orlop.MicroBatch) -> bool:
    return bool((batch.labels != _orlop.IGNORED_LABEL).any())


def evaluate(
    engine: _orlop.Engine,
    batches: list[_orlop.MicroBatch],
    group: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> float | None:
    """Mean loss over all labelled tokens, `group` micro-batches of every rank at a time; None when it was stopped
    between two groups."""
    total = 0.0
    tokens = 0
    ranks = engine.world_size
    for start in range(0, len(batches), group * ranks):
        if is_stopped():
            return None
        part = batches[start : start + group * ranks]
        if not any(has_labels(batch) for batch in part):
            continue
        result = engine.evaluate(part[engine.rank :: ranks])
        total += result.loss * result.labelled_tokens
        tokens += result.labelled_tokens
    if tokens == 0:
        raise InvalidDataError("evaluation: the held-out files hold no token to predict")
    return total / tokens


class FinetuneRun:
    """One run in one folder. Made, then run() once. Of several ranks, the first prepares the data and tells
    of the run; all see one folder."""

    def __init__(self, config: RunConfig, run_dir: Path, ranks: _orlop.Ranks):
        self._config = config
        self._run_dir = run_dir
        self._ranks = ranks
        self._is_first = ranks.rank == 0
        if self._is_first:
            self._prepare()
        ranks.barrier("data")
        if not self._is_first:
            self._prepare()
        found = find_checkpoint(config.resume, run_dir) if self._is_first else ""
        self._checkpoint = ranks.from_first(found)
        self._saved_step = 0
        self._passed_over = False

    def _prepare(self) -> None:
        config, run_dir, ranks = self._config, self._run_dir, self._ranks
        cache = run_dir / "data"
        source = (cache, config.model, config.train_on, config.chat_template)
        self._data = prepare(config.data, *source)
        eval_data = prepare(config.eval_data, *source) if config.eval_data else None
        batch = batch_config(config)
        self._loader = _orlop.DataLoader(
            str(self._data.path),
            batch,
            seed=config.seed,
            shuffle=True,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        self._eval_batches = micro_batches(config, eval_data) if eval_data else []
        self._total_steps = total_steps(config, self._loader.rows_per_epoch(), ranks.world_size)

    def _write_config(self) -> None:
        """What `orlop export` reads, from any folder. A run that was refused has left the one of the checkpoints in
        place."""
        values = self._config.as_dict() | {"model": os.path.abspath(self._config.model)}
        replace_text(self._run_dir / "config.json", json.dumps(values, indent=2) + "\n")

    def _print(self, text: str) -> None:
        if self._is_first:
            print_line(text)

    def run(self) -> RunResult:
        ranks = self._ranks.world_size
        self._print(
            f"data: {self._data.tokens:,} tokens in {self._data.documents:,} documents, "
            f"{self._loader.rows_per_epoch():,} rows of {self._config.seq_len}; {self._total_steps:,} steps"
            + (f" on {ranks} ranks" if ranks > 1 else "")
        )
        with (
            StopRequest() as stop,
            _orlop.Engine.open(self._config.model, self._engine_config()) as engine,
        ):
            self._print(engine.plan.to_text())
            if self._config.trace:
                engine.start_trace()
            tokens = self._restore(engine) if self._checkpoint else 0
            if self._is_first:
                self._write_config()
            with closing(self._open_progress()) as progress, closing(self._open_log(engine, progress)) as log:
                try:
                    return self._train(engine, stop, log, progress, StepRecorder(engine, tokens))
                finally:
                    if self._config.trace:
                        name = "trace.json" if self._is_first else f"trace-{self._ranks.rank}.json"
                        engine.write_trace(str(self._run_dir / name))

    def _engine_config(self) -> _orlop.EngineConfig:
        """Has the engine check that the run's checkpoints find room: one is written before the oldest is removed."""
        config = self._config
        saves = -(-self._total_steps // config.save_every) if config.save_every else 1
        there = sum(1 for _ in self._run_dir.glob("step-*/manifest.json"))
        native = engine_config(config, self._total_steps)
        native.checkpoint_room = max(1, min(saves, config.keep + 1) - there)
        return native

    def _open_progress(self) -> Progress | NoProgress:
        return Progress(self._total_steps, self._config.log_every) if self._is_first else NoProgress()

    def _open_log(self, engine: _orlop.Engine, progress: Progress | NoProgress) -> MetricsLog | NoMetrics:
        return MetricsLog(self._run_dir, engine.steps_done, progress.note) if self._is_first else NoMetrics()

    def _user_state(self, tokens: int) -> str:
        position = self._loader.position()
        return json.dumps(
            {
                "data_key": self._data.key,
                "seq_len": self._config.seq_len,
                "seed": self._config.seed,
                "epoch": position.epoch,
                "row": position.row,
                "tokens": tokens,
            }
        )

    def _restore(self, engine: _orlop.Engine) -> int:
        """Loads the checkpoint and the position in the data. Returns the tokens seen so far."""
        try:
            user_state = engine.load_checkpoint(self._checkpoint)
        except InvalidDataError as error:
            others = other_checkpoints(self._run_dir, self._checkpoint)
            raise InvalidDataError(
                f"{error}{others and f'; go on from another one with --resume {others}'}"
            ) from None
        try:
            state = json.loads(user_state)
            position = _orlop.DataPosition(epoch=state["epoch"], row=state["row"])
            tokens = int(state["tokens"])
        except (ValueError, KeyError, TypeError):
            raise InvalidDataError(
                f"{self._checkpoint}: the manifest holds no position in the data; it was not written by "
                "orlop finetune"
            ) from None
        mine = json.loads(self._user_state(0))
        for key in _DATA_KEYS:
            if state.get(key) != mine[key]:
                raise UsageError(
                    f"{self._checkpoint}: written with {key}={state.get(key)}, this run has {key}={mine[key]}; "
                    "give the same data, model, seq_len and seed, or another --output"
                )
        self._loader.seek(position)
        self._saved_step = engine.steps_done
        self._print(f"resumed from {self._checkpoint} (step {engine.steps_done})")
        return tokens

    def _evaluate(
        self,
        engine: _orlop.Engine,
        stop: StopRequest,
        log: MetricsLog | NoMetrics,
        progress: Progress | NoProgress,
    ) -> float | None:
        """None without held-out files, and when a signal has ended it."""
        if not self._eval_batches:
            return None
        loss = evaluate(engine, self._eval_batches, self._config.accum, lambda: self._is_stopped(stop))
        if loss is None:
            return None
        log.write({"step": engine.steps_done, "eval_loss": loss})
        progress.note(f"held-out loss at step {engine.steps_done}: {loss:.4f}")
        return loss

    def _save(
        self, engine: _orlop.Engine, progress: Progress | NoProgress, tokens: int, background: bool = False
    ) -> None:
        """Without `background` the newest step is saved when this returns."""
        if engine.steps_done == self._saved_step:
            if not background:
                engine.wait_for_save()
            return
        mode = _orlop.SaveMode.BACKGROUND if background else _orlop.SaveMode.WAIT
        path = engine.save_checkpoint(str(self._run_dir), self._user_state(tokens), self._config.keep, mode)
        self._saved_step = engine.steps_done
        progress.note(f"saving {path} beside the next steps" if background else f"saved {path}")

    @contextmanager
    def _saving_what_is_whole(
        self,
        engine: _orlop.Engine,
        progress: Progress | NoProgress,
        recorder: StepRecorder,
        harmless: tuple[type[Error], ...] = _BEFORE_ANY_UPDATE,
    ) -> Iterator[None]:
        """For one step, evaluation or export: an error that comes before it has touched a state is raised with the state
        of the steps before it saved."""
        position = self._loader.position()
        try:
            yield
        except harmless:
            self._loader.seek(position)
            try:
                self._save(engine, progress, recorder.tokens)
            except Error as error:  # the first error is the one to tell
                progress.note(f"step {engine.steps_done} could not be saved: {error}")
            raise

    def _next_micro_batches(
        self, engine: _orlop.Engine, progress: Progress | NoProgress
    ) -> list[_orlop.MicroBatch]:
        """Of the next step. Where no rank's rows hold a token to predict, as within a long question or a last row of
        one token, they are passed over."""
        config = self._config
        step_rows = config.micro_batch * config.accum * self._ranks.world_size
        for _ in range(-(-self._loader.rows_per_epoch() // step_rows) + 1):
            batches = [self._loader.next() for _ in range(config.accum)]
            if self._ranks.any(any(has_labels(batch) for batch in batches)):
                return batches
            if not self._passed_over:
                progress.note(
                    f"step {engine.steps_done + 1}: rows without a token to predict are passed over, here and later"
                )
            self._passed_over = True
        raise InvalidDataError(
            f"{', '.join(config.data)}: of {self._loader.rows_per_epoch():,} rows of {config.seq_len} tokens none holds "
            "one to predict; give a longer --seq-len, or --train-on all"
        )

    def _train(
        self,
        engine: _orlop.Engine,
        stop: StopRequest,
        log: MetricsLog | NoMetrics,
        progress: Progress | NoProgress,
        recorder: StepRecorder,
    ) -> RunResult:
        config = self._config
        evaluated_step = None  # the last one with a held-out loss of this process

        def held_out_loss() -> float | None:
            nonlocal evaluated_step
            with self._saving_what_is_whole(engine, progress, recorder):
                loss = self._evaluate(engine, stop, log, progress)
            evaluated_step = engine.steps_done
            return loss

        loss_before = held_out_loss() if engine.steps_done == 0 else first_eval_loss(self._run_dir)
        loss_after = loss_before
        stopped = self._is_stopped(stop)
        while engine.steps_done < self._total_steps and not stopped:
            with self._saving_what_is_whole(engine, progress, recorder):
                result = engine.step(self._next_micro_batches(engine, progress))
            record = recorder.record(result)
            log.write(record)
            progress.step(record)
            stopped = self._is_stopped(stop)
            if stopped:
                break
            if config.save_every and result.step % config.save_every == 0:
                self._save(engine, progress, recorder.tokens, background=config.async_save)
            if config.eval_every and result.step % config.eval_every == 0:
                loss_after = held_out_loss()
                stopped = self._is_stopped(stop)
        if not stopped:
            if config.save_every:
                self._save(engine, progress, recorder.tokens)
            if evaluated_step != engine.steps_done:
                loss_after = held_out_loss()
                stopped = self._is_stopped(stop)
        if stopped:
            self._save(engine, progress, recorder.tokens)
            self._report_stop(engine, stop, progress)
            return RunResult(INTERRUPTED, engine.steps_done, loss_before, None, None)
        export_dir = self._run_dir / "hf" if config.export else None
        if export_dir is not None:
            with self._saving_what_is_whole(engine, progress, recorder, (Error,)):  # it reads states alone
                engine.export_hf(str(export_dir), config.max_shard_size)
            progress.note(f"exported {export_dir}")
        self._report_traffic(engine, progress)
        return RunResult(0, engine.steps_done, loss_before, loss_after, export_dir)

    def _report_stop(self, engine: _orlop.Engine, stop: StopRequest, progress: Progress | NoProgress) -> None:
        name = stop.signal.name if stop.signal is not None else "signal to another rank"
        if engine.steps_done == 0:
            progress.note(f"{name}: stopped before step 1 was done; there was no state to save")
        else:
            progress.note(f"{name}: stopped after step {engine.steps_done} with its state saved")

    def _is_stopped(self, stop: StopRequest) -> bool:
        """All ranks stop after the same step, or the same part of an evaluation."""
        return self._ranks.any(stop.signal is not None)

    def _report_traffic(self, engine: _orlop.Engine, progress: Progress | NoProgress) -> None:
        stats = engine.stats()
        progress.note(
            f"uploaded {format_bytes(stats.uploaded_bytes)}, offloaded {format_bytes(stats.offloaded_bytes)}; "
            f"peak device {format_bytes(stats.device_peak_bytes)}, host {format_bytes(stats.host_bytes)}"
        )
        if engine.plan.nvme_bytes:
            progress.note(
                f"drives: read {format_bytes(stats.nvme_read_bytes)}, "
                f"written {format_bytes(stats.nvme_written_bytes)}"
            )


def finetune(config: RunConfig) -> RunResult:
    """One run from its configuration to its export, or to the signal that stops it. Errors are orlop.Error."""
    config.require("model", "data", "output")
    check_folders(config)
    ranks = _orlop.Ranks()
    hold = locked_run_dir if ranks.rank == 0 else nullcontext
    with hold(Path(config.output)) as run_dir:
        return FinetuneRun(config, run_dir, ranks).run()
