"""Batch sizes of a ds_config.json."""

from __future__ import annotations

from unipar.backend.foreign import AUTO, ForeignConfigReader, ForeignSection


def read_batch(keys: ForeignSection) -> None:
    """Carry the three batch sizes: two of them give the third, and all three give the number of ranks."""
    reading = keys.reading
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    reading.read.update(map(keys.name, names))
    sizes = {name: keys.take(name, int, 0) for name in names if keys.data.get(name) not in (None, AUTO)}
    autos = [name for name in names if keys.data.pop(name, None) == AUTO]
    total, micro, accumulate = (sizes.get(name, 0) for name in names)
    world = reading.world
    if total and micro and accumulate and not world:
        if total % (micro * accumulate):
            reading.wrong.append(
                f"train_batch_size: {total} is not a multiple of train_micro_batch_size_per_gpu x "
                f"gradient_accumulation_steps ({micro} x {accumulate} = {micro * accumulate})"
            )
        else:
            world = total // (micro * accumulate)
            reading.put("parallel.data", world, f"{total} / ({micro} x {accumulate})")
    elif total and micro and accumulate and world and total != micro * accumulate * world:
        reading.wrong.append(
            f"train_batch_size: {total} is not {micro} x {accumulate} x {world} ranks = {micro * accumulate * world}"
        )
    if world:
        reading.put("parallel.data", world)
    if total:
        reading.put("batch.total", total)
    if micro:
        reading.put("batch.micro", micro)
    if accumulate and not (total and micro):
        reading.put("batch.accumulate", accumulate)
    elif micro and not total and "gradient_accumulation_steps" not in autos:
        reading.put("batch.accumulate", 1)
    enough = total or (micro and (accumulate or "gradient_accumulation_steps" not in autos))
    if not enough:
        what = ", ".join(f'{name}: "auto"' for name in autos) or names[0]
        _ask_for_batch(reading, what)


def _ask_for_batch(reading: ForeignConfigReader, what: str) -> None:
    """Ask for the batch, or for the one number that is lacking beside the given one."""
    if reading.answered("batch.total") or reading.answered("batch.tokens"):
        return
    known = [key for key in ("batch.micro", "batch.accumulate") if reading.answered(key) or key in reading.config]
    if len(known) == 1:
        lacking, example = ("batch.micro", "4") if known == ["batch.accumulate"] else ("batch.accumulate", "1")
        reading.ask(f"{what}, and {known[0]} alone does not say the batch", lacking, example)
    elif not known:
        reading.ask(what, "batch", "'{total: 32, micro: 4}'")
