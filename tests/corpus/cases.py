"""Silent errors that others reported: the thread, what was wrong, and what `unipar verify` must name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One silent error, re-created in an engine of this name in `corpus_backend`."""

    thread: str
    """Thread: `owner/repository#number` of an issue, `owner/repository!number` of a pull request."""

    wrong: str
    """Sentences on what was wrong."""

    kind: str
    """Kind of fault that the verdict must name."""

    place: str
    """Place that the verdict must name, as `place_of` writes it."""

    check: str
    """Function of `unipar.verification.diagnosis` without which the case is not named."""

    cell: str = "nothing"
    """Cell that is verified, without the backend and the variant: what is sharded, and further axes."""

    task: str = "Texts"
    """Class of `tests.corpus.tasks`."""

    alive: str = ""
    """Library and version in which the error can still be seen; the engine then runs that library's own code."""

    always: bool = False
    """Whether it is verified whenever tests run; the others are in the sweeps."""


CASES: dict[str, Case] = {
    "divided-again": Case(
        "huggingface/accelerate#3877",
        "Under ZeRO-2 accumulation gave higher losses: a backward hook divided by the number of microbatches although "
        "the caller had done so (DeepSpeed PR 7724). DeepSpeed#7718 has norms of that time: 1.6262 where 4.7373 was "
        "right.",
        "divided twice by accumulation",
        "step 1",
        "faults._classify_factor",
        always=True,
    ),
    "times-accumulation": Case(
        "axolotl-ai-cloud/axolotl#2262",
        "Eight microbatches of one sample gave a loss and a norm eight times those of one microbatch of eight: nothing "
        "divided by their number.",
        "not divided by accumulation",
        "step 1, backward head (rank 0, microbatch 1)",
        "faults._classify_factor",
    ),
    "averaged-again": Case(
        "pytorch/torchtitan#2318",
        "Norms under DDP and HSDP were off by a factor of 8 from FSDP's: the loss was divided by the tokens of all "
        "ranks, and DDP still took the mean over ranks (PR 2323).",
        "averaged twice",
        "step 1",
        "faults._classify_factor",
    ),
    "discarded": Case(
        "allenai/open-instruct!1498",
        "With gradient_accumulation_steps: 1 every backward is a boundary for ZeRO-2, which then sets aside what it "
        "has accumulated: of a step's microbatches only the last one's gradient was left.",
        "a microbatch left out",
        "step 1, token.weight and 26 more",
        "faults._classify_uneven_mix",
    ),
    "not-zeroed": Case(
        "deepspeedai/DeepSpeed#7837",
        "Norms grew under ZeRO-0 with bf16 alone: the step skipped zero_grad, so that each step added to the gradient "
        "of the one before (PR 7839).",
        "a stale gradient",
        "step 2, token.weight and 26 more",
        "faults._classify_mix",
        always=True,
    ),
    "same-samples": Case(
        "huggingface/finetrainers!415",
        "A stream was not split over processes: three processes each read samples 0 to 3, then 4 to 7, and so on.",
        "samples seen twice",
        "step 1, forward token (rank 1, microbatch 1), backward head (rank 0, microbatch 1)",
        "faults._classify_samples",
        always=True,
    ),
    "split-twice": Case(
        "huggingface/accelerate!4276",
        "A stream that is split over processes already is split once more when its loader is prepared, and each "
        "process skips samples without a word (issue 3547).",
        "other samples",
        "step 1, forward token (rank 1, microbatch 1), backward head (rank 0, microbatch 1)",
        "faults._classify_samples",
    ),
    "same-order": Case(
        "pytorch/pytorch#31771",
        "DistributedSampler shuffles by an epoch that it has to be told (set_epoch); untold, every epoch has the same "
        "order.",
        "other samples",
        "step 5, forward token (rank 0, microbatch 1), backward head (rank 0, microbatch 1)",
        "faults._classify_samples",
    ),
    "bf16-table": Case(
        "huggingface/transformers#25681",
        "Casting a model to bf16 casts the frequencies of its rotary embedding too, and positions lose their digits.",
        "another forward",
        "step 1, forward positions (rank 0, microbatch 1), backward head (rank 0, microbatch 1)",
        "faults._classify_forward",
        always=True,
    ),
    "rate-ahead": Case(
        "huggingface/accelerate#2926",
        "A scheduler that Accelerate has prepared moves once for every process in each step, so that a schedule made "
        "for the steps of the run ends at a fraction of them. It does so by design, and users still report it in 2026 "
        "(Lightricks/LTX-Video-Trainer#67).",
        "a rate that runs ahead",
        "step 2, token.weight and 26 more",
        "faults._classify_rate",
        alive="accelerate 1.15.0",
        always=True,
    ),
    "old-parameters": Case(
        "huggingface/accelerate#3256",
        "The optimizer was made before FSDP replaced the parameters (fsdp_use_orig_params: false), and stepped those "
        "that nobody used: nothing was trained.",
        "no update",
        "step 1, token.weight and 26 more",
        "faults._classify_missing_update",
    ),
    "some-old-parameters": Case(
        "pytorch/pytorch#149205",
        "A forward of an FSDP2 model before its optimizer was made left the optimizer with other parameters than those "
        "of training, perhaps some layers' only.",
        "parameters left out",
        "step 1, blocks.0.norm1.weight and 11 more",
        "faults._classify_missing_update",
        always=True,
    ),
}
