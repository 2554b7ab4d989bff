"""The engine: a batch of rows in, one outcome per row out, on one device."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from batchgen.cost import Measurement
from batchgen.engine.compiling import Compiler, mode_named, mode_of, order_by_channels
from batchgen.engine.decode import Decoder, Decoding, Fault
from batchgen.engine.denoise import NO_PICTURES, Pictures, denoise_own
from batchgen.engine.devices import (
    dtype_of,
    errors_named,
    find_device,
    is_memory,
    limit_memory,
    placing,
    quiet_libraries,
    usable_bytes,
    versions_of,
)
from batchgen.engine.graphs import GraphPool, device_bytes
from batchgen.engine.loras import Loras
from batchgen.engine.meter import Meter
from batchgen.engine.prompts import Prompts
from batchgen.engine.residence import Residence
from batchgen.engine.room import with_room
from batchgen.engine.safety import Safety
from batchgen.engine.samplers import Samplers, Table
from batchgen.engine.steps import Steps
from batchgen.engine.tuning import Tuning
from batchgen.generator import Context, OutOfMemory, Pending
from batchgen.job import Job
from batchgen.models.contents import ModelFolder
from batchgen.models.facts import OWN_UPDATE, Facts
from batchgen.models.family import Conditioning, Family
from batchgen.models.fitting import check_keys
from batchgen.models.folder import facts_of, find_model
from batchgen.models.loaders import LOADERS
from batchgen.models.lora_files import lora_sets
from batchgen.models.tokens import TokenCount, count_tokens
from batchgen.models.transfer import Mark, to_device
from batchgen.pictures import read_all
from batchgen.records import Batch, Bucket, Captured, Failure, Group, Image, Outcome, Pixels, Row, Spent


class Engine:
    """The job's model, loaded; a `batchgen.generator.Generator`. Raises UsageError as loading does."""

    def __init__(self, job: Job, context: Context | None = None) -> None:
        context = context or Context()
        self.device = find_device(job.engine.device)
        self.facts = facts_of(job.model, has_checker=job.engine.safety_checker)
        limit_memory(job.engine.max_memory_bytes, self.device, context.say)
        folder = _folder(job)
        self.model = _load(job, self.facts, self.device, folder)
        self.samplers = Samplers(self.model.scheduler, self.facts)
        if folder.replaced.has_scheduler:
            schedule = self.model.schedule(self.facts.min_size, self.facts.min_size, self.facts.steps)
            self.samplers.check_own(folder.replaced.scheduler, schedule)
        self._meter = Meter(self.device)
        self.versions: Mapping[str, str] = versions_of(self.device, self.model.dtype)
        self._compiler = Compiler(self.model)
        self._pool = GraphPool(self.device)
        self.steps = Steps(self.model, self._compiler, self._pool, context)
        self._group: Group | None = None
        with quiet_libraries():
            self._loras = Loras(self.model.pipeline, lora_sets(job.model), job.model.path)
        self._prompts = Prompts(self.model, self._loras, Residence(job.engine.text_encoder, self.model, folder))
        self._say = context.say
        self._decoder = Decoder(
            self.model, self._compiler, self._pool, context.say, free=self.free, preparing=context.preparing
        )
        self._captures_decodes = True
        self._safety = Safety(self.model.checker, self.device) if self.model.checker else None
        memory_bytes = usable_bytes(job.engine.max_memory_bytes, self.device)
        self._tuning = Tuning(job.engine, self.device, self.versions["device"], memory_bytes, context)

    @torch.inference_mode()
    def prepare(self, batches: Sequence[Batch], should_drop: Callable[[], bool]) -> None:
        """Encode the texts of a shard. As Generator.prepare."""
        texts: dict[str, list[str]] = {}
        for batch in batches:
            texts.setdefault(batch.group.lora, []).extend(self.model.texts(batch.rows, batch.group.is_guided))
        with errors_named(self.versions["device"]), self._meter.encoding(sum(len(batch.rows) for batch in batches)):
            with_room("encoding texts", lambda: self._prompts.prepare(texts, should_drop), self.free)

    def submit(self, batch: Batch, should_drop: Callable[[], bool]) -> Pending:
        """Queue a batch on the device. A row whose init image is bad, or that is no picture, fails alone. As
        Generator.submit; DeviceLost is any CUDA error but lack of memory, after which the context is unusable."""
        read = read_all(batch.rows)
        failures = {index: one for index, one in read.items() if isinstance(one, Failure)}
        pictures = {index: one for index, one in read.items() if not isinstance(one, Failure)}
        good = tuple(row for row in batch.rows if row.index not in failures)
        pending = self._queue(replace(batch, rows=good), pictures, should_drop) if good else list

        def outcomes() -> list[Outcome]:
            made: dict[int, Outcome] = {one.row.index: one for one in pending()}
            return [made.get(row.index) or failures[row.index] for row in batch.rows]

        return outcomes

    def _queue(self, batch: Batch, pictures: Pictures, should_drop: Callable[[], bool]) -> Pending:
        try:
            with errors_named(self.versions["device"]):
                return self._submit(batch, pictures, should_drop)
        except OutOfMemory:
            if not self.free():
                raise
        with errors_named(self.versions["device"]):
            return self._submit(batch, pictures, should_drop)

    @torch.inference_mode()
    def _submit(self, batch: Batch, pictures: Pictures, should_drop: Callable[[], bool]) -> Pending:
        started, is_first = time.perf_counter(), not self._tuning.is_settled
        num_captures, watch = len(self.steps.captures), self._meter.watch()
        conditioning = self.conditioning(batch)
        watch.pass_stage()
        latents, mode = self.denoise(batch, conditioning, should_drop, pictures)
        watch.pass_stage()
        decoding = self._decode(batch.bucket, latents, is_captured=mode_of(mode)[1])
        watch.pass_stage()
        is_steady = not is_first and num_captures == len(self.steps.captures)
        # Another number of images at once than was settled: their last bits may be others.
        retries = int(self._decoder.is_cut(self.decode_chunk(batch.bucket)))
        counts = self._count(batch)
        seconds = (time.perf_counter() - started) / len(batch.rows)
        held_bytes = self.steps.held_bytes + self._decoder.held_bytes

        def outcomes() -> list[Outcome]:
            with errors_named(self.versions["device"]), torch.inference_mode():
                decoded = self._checked(decoding())
                stage_s = self._meter.count(watch, len(batch.rows), held_bytes)
            if is_steady and batch.group.form != OWN_UPDATE:
                evaluations = [table.num_evaluations for table in self.tables(batch.rows)]
                self._meter.measure(batch.bucket, mode, evaluations, stage_s, watch.peak_bytes + held_bytes)
            return [
                _outcome(row, result, batch.size, mode, count, seconds, retries)
                for row, result, count in zip(batch.rows, decoded, counts, strict=True)
            ]

        return outcomes

    def measurements(self) -> Sequence[Measurement]:
        """As Generator.measurements; nothing on a CPU."""
        return self._meter.measurements

    def spent(self) -> Spent:
        """As Generator.spent."""
        captures = [
            Captured(str(one.bucket), one.mode, one.seconds, one.compile_s, max(0, one.after_bytes - one.before_bytes))
            for one in self.steps.captures
        ]
        return Spent(dict(self.stage_s), tuple(captures), self._meter.peak_bytes, device_bytes(self.device) or 0)

    @property
    def stage_s(self) -> Mapping[str, float]:
        """Device seconds per stage, of the batches whose outcomes were asked for."""
        return self._meter.stage_s

    def decode_chunk(self, bucket: Bucket) -> int:
        """How many of a bucket's images are decoded at once, once a batch has been submitted."""
        return self._tuning.decoding(bucket)[1]

    @torch.inference_mode()
    def conditioning(self, batch: Batch) -> Conditioning:
        """What the network is told of all rows of a batch, padding included."""
        rows, is_guided = _padded(batch), batch.group.is_guided
        texts = self.model.texts(rows, is_guided)
        encoded = with_room("encoding texts", lambda: self._prompts.encoded(batch.group.lora, texts), self.free)
        return self.model.conditioning(rows, batch.group, encoded)

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Each row's sampler at its step count, size and strength."""
        schedule = self.model.schedule
        return [
            self.samplers.table(
                row.sampler, row.steps, schedule(row.width, row.height, row.steps), self.facts.skips(row)
            )
            for row in rows
        ]

    @torch.inference_mode()
    def denoise(
        self,
        batch: Batch,
        conditioning: Conditioning,
        should_drop: Callable[[], bool],
        pictures: Pictures = NO_PICTURES,
    ) -> tuple[Tensor, str]:
        """Final latents `[R, C, h, w]` of the batch's R rows, and the mode that ran; padding is cut off. More rows than
        lanes take turns in them."""
        rows, bucket = _padded(batch), batch.bucket
        is_own = batch.group.form == OWN_UPDATE
        tables = [] if is_own else self.tables(rows)
        self._loras.use(batch.group.lora)
        self._choose(bucket, rows[: batch.size], conditioning)
        self._enter(batch.group.shape)
        with self._tuning.kernels():
            if is_own:
                assert len(rows) == batch.size, "a scheduler that steps the batch itself has one step count for all"
                schedule = self.model.schedule(batch.group.width, batch.group.height, batch.group.steps)
                scheduler = self.samplers.scheduler(batch.group.sampler, batch.group.steps, self.device, schedule)
                skipped, mode = batch.group.skipped, "eager"
                latents = denoise_own(self.model, rows, scheduler, conditioning, should_drop, pictures, skipped)
            else:
                mode = self._tuning.mode(bucket)
                latents, mode = self.steps.run(bucket, mode, rows, tables, conditioning, should_drop, pictures)
        return latents[: len(batch.rows)], mode

    def _decode(self, bucket: Bucket, latents: Tensor, *, is_captured: bool) -> Decoding:
        """Queue the decoding, captured where the steps are: launching its kernels one by one would hold the host up.
        Where memory is short the graphs go first, the decoder's for good, then the chunk is halved."""
        kernels, chunk = self._tuning.decoding(bucket)
        while True:
            is_replayed = is_captured and self._captures_decodes
            try:
                with self._tuning.kernels():
                    return self._decoder.start(latents, mode_named(kernels, is_captured=is_replayed), chunk)
            except RuntimeError as error:
                if not is_memory(error):
                    raise
                if is_replayed:
                    self._captures_decodes = False
                    self.free()
                    self._say("a captured decode does not fit into memory; from now on its kernels are launched")
                elif not self._decoder.shrink(chunk) and not self.free():
                    raise

    def _checked(self, decoded: list[Pixels | Fault]) -> list[Pixels | Fault]:
        """A finished batch's pictures as the safety checker leaves them."""
        safety = self._safety
        return decoded if safety is None else with_room("the safety check", lambda: safety.check(decoded), self.free)

    def _choose(self, bucket: Bucket, rows: Sequence[Row], conditioning: Conditioning) -> None:
        """Settle the modes, at the first batch, and order the weights as they want them."""
        if self._tuning.is_settled:
            return
        model, places = self.model, list(range(len(rows)))

        @functools.cache
        def noise() -> Tensor:
            made = torch.cat([model.noise(row, torch.Generator().manual_seed(0)) for row in rows])
            return to_device(made, self.device)

        def probe(times: int) -> None:
            timesteps = torch.full((times * len(rows),), 500.0, device=self.device)
            model.predict(model.network, noise().repeat(times, 1, 1, 1), timesteps, conditioning.of(times * places))

        self._tuning.choose(bucket, sum(parameter.numel() for parameter in model.network.parameters()), probe)
        self._pool.clear()
        self._meter.forget_peak()
        if self._tuning.is_compiled:
            for network in (model.network, model.vae):
                order_by_channels(network)

    def _enter(self, group: Group) -> None:
        """Free what only the group before needed."""
        if group == self._group:
            return
        self._group = group
        self.free()
        self._compiler.forget_shapes()

    def free(self) -> bool:
        """Give back what graphs hold; whether there were any."""
        had_any = self._pool.num_graphs > 0
        if had_any:
            # Replays of the batch before may still be queued; their graphs must outlive them.
            Mark(self.device).wait()
        self.steps.forget()
        self._decoder.forget()
        if had_any:
            self._pool.clear()
        return had_any

    def _count(self, batch: Batch) -> list[TokenCount]:
        """Tokens read of each prompt; dropped of it and, where the row is guided, of its negative prompt."""
        tokenizer = self.model.tokenizer
        prompts = count_tokens(tokenizer, [row.prompt for row in batch.rows], self.facts)
        texts = [(row.negative_prompt or "") if batch.group.is_guided else "" for row in batch.rows]
        negatives = count_tokens(tokenizer, texts, self.facts, are_negative=True)
        return [
            TokenCount(prompt.read, prompt.dropped + negative.dropped)
            for prompt, negative in zip(prompts, negatives, strict=True)
        ]


def _padded(batch: Batch) -> tuple[Row, ...]:
    """A row for each lane at least: padding repeats the last one."""
    return batch.rows + batch.rows[-1:] * (batch.size - len(batch.rows))


def _outcome(
    row: Row, result: Pixels | Fault, batch_size: int, mode: str, count: TokenCount, seconds: float, retries: int
) -> Outcome:
    if isinstance(result, Fault):
        return Failure(row, result.error, result.message, retries)
    return Image(row, result, batch_size, mode, count.read, count.dropped, seconds, retries)


def _folder(job: Job) -> ModelFolder:
    """The job's model folder. Raises UsageError as `find_model` and `check_keys`."""
    folder = find_model(job.model, has_checker=job.engine.safety_checker)
    check_keys(job, folder)
    is_deferred = job.engine.text_encoder == "load"
    return replace(folder, deferred=frozenset(folder.encoders)) if is_deferred else folder


def _load(job: Job, facts: Facts, device: torch.device, folder: ModelFolder) -> Family:
    dtype = dtype_of(job.model.dtype, facts, device)
    vae_dtype = None if job.model.vae_dtype is None else dtype_of(job.model.vae_dtype, facts, device)
    with quiet_libraries(), placing(job.model.path, device):
        family = LOADERS[folder.family](folder, dtype, vae_dtype, device)
    if job.engine.vae_tiling:
        family.vae.enable_tiling()
    return family
