"""The update of orlop.AdamW: on the host's thread and on devices, hidden under what comes next."""

from __future__ import annotations

import itertools

from . import _orlop

_UPLOAD_BYTES = 16 << 20


class UpdateSide:
    """Part of AdamW, over its `_slots`, `_links`, `_gate` and `_stream`."""

    def _update(self, work):
        if self._gate is not None:
            rank = self._gate.rank
            work = sorted(work, key=lambda item: rank.get(item[0].param, -1))
        self.steps += 1
        self._find_written([slot for slot, _ in work])
        for slot, _ in work:
            slot.follow_weights()
        for link in self._links.values():
            link.begin_updates()
        for factor, run in itertools.groupby(work, key=lambda item: item[0].factor):
            run = list(run)
            self._update_on_devices([item for item in run if item[0].home.on_device], factor)
            self._update_on_host([item for item in run if not item[0].home.on_device], factor)
        if self._stream is not None:
            self._stream.fetch_resident()
        if self._gate is not None:
            self._gate.close([slot for slot, _ in work])
            return
        for link in self._links.values():
            link.make_current_stream_wait()
        if any(slot.link is None for slot, _ in work):
            self.synchronize()

    def _find_written(self, slots):
        """Weights on a device with a home in host memory, which somebody may have written through `data`. Not where no
        step waits for the device."""
        for link in self._links.values():
            kept = [slot for slot in slots if slot.link is link and slot.measures and not slot.home.on_device]
            for slot in link.written_weights(kept):
                slot.version = None

    def _update_on_host(self, run, factor):
        if not run:
            return
        updates, owners, hypers = [], [], {}
        for slot, group in run:
            home = slot.home
            view, owner = slot.view()
            step = int(self._show_state(slot.param)["step"]) + 1
            hyper = hypers.get((id(group), step))
            if hyper is None:
                hyper = hypers[id(group), step] = self._hyper(group, step)
            updates.append(_orlop.TensorUpdate(home.index, view, hyper, *home.fence(), home.is_written()))
            owners += [owner, home.arrival]
        version = self._native.update(updates, factor, self.steps, owners)
        for turn, (slot, _) in enumerate(run):
            slot.home.job, slot.home.turn = version, turn
            self.state[slot.param]["step"] += 1
        for link, slots in self._uploads(run):
            link.upload(slots, version)
        for slot, _ in run:
            slot.wrote_weights()

    def _uploads(self, run):
        """(link, slots) whose weights go up together, in the order of their updates: of one block where a module
        tells of blocks, and no more than so many that the first would wait for the last."""
        part, slots, size = None, [], 0
        for slot, _ in run:
            if not slot.link:
                continue
            its_part = slot.link, None if self._gate is None else self._gate.unit_of(slot.param)
            if slots and (its_part != part or size >= _UPLOAD_BYTES):
                yield part[0], slots
                slots, size = [], 0
            part = its_part
            slots.append(slot)
            size += slot.param.nbytes
        if slots:
            yield part[0], slots

    def _update_on_devices(self, run, factor):
        """In batches, behind each of which somebody can wait for its weights: of one device, of one block."""

        def belongs_to(slot):
            return slot.home.link, None if self._gate is None else self._gate.unit_of(slot.param)

        for _, batch in itertools.groupby(run, key=lambda item: belongs_to(item[0])):
            self._update_batch(list(batch), factor)

    def _update_batch(self, batch, factor):
        states = batch[0][0].home.link.states
        shards, hypers, plain = [], [], False
        for slot, group in batch:
            plain = plain or not slot.is_away
            slot.home.shard.grad = slot.home.hold(slot.gradient_to_use()).data_ptr()
            shards.append(slot.home.shard)
            hypers.append(self._hyper(group, int(self._show_state(slot.param)["step"]) + 1, slot.seed))
        updated = states.adam_steps(shards, hypers, factor)
        if plain:  # the user may write what is being read
            states.wait(updated)
        for slot, _ in batch:
            slot.home.left_last = updated
            self.state[slot.param]["step"] += 1
            slot.wrote_weights()

    def _hyper(self, group, step, seed=0):
        """Of the update that is the parameter's `step`th; on the host the seed is the tensor's own."""
        beta1, beta2 = group["betas"]
        return _orlop.AdamHyper(
            lr=max(0.0, float(group["lr"])),  # a scheduler's zero may be below it by roundings
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
            decoupled=bool(group.get("decoupled_weight_decay", self._decoupled)),
            step=step,
            seed=seed,
        )
