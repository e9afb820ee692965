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

    strategy: str = "nothing"
    """Strategy that is verified, without the backend and the variant: what is sharded, and further axes."""

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
        "step 1, token.weight and others",
        "faults._classify_uneven_mix",
    ),
    "not-zeroed": Case(
        "deepspeedai/DeepSpeed#7837",
        "Norms grew under ZeRO-0 with bf16 alone: the step skipped zero_grad, so that each step added to the gradient "
        "of the one before (PR 7839).",
        "a stale gradient",
        "step 2, token.weight and others",
        "faults._classify_mix",
    ),
    "same-samples": Case(
        "huggingface/finetrainers!415",
        "A stream was not split over processes: three processes each read samples 0 to 3, then 4 to 7, and so on.",
        "samples seen twice",
        "step 1, forward token (rank 1, microbatch 1), backward head (rank 0, microbatch 1)",
        "faults._classify_samples",
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
        "DistributedSampler shuffles by an epoch that the caller must set (set_epoch); without it every epoch has the "
        "same order.",
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
        "step 2, token.weight and others",
        "faults._classify_rate",
        alive="accelerate 1.15.0",
        always=True,
    ),
    "old-parameters": Case(
        "huggingface/accelerate#3256",
        "The optimizer was made before FSDP replaced the parameters (fsdp_use_orig_params: false), and stepped those "
        "that nobody used: nothing was trained.",
        "no update",
        "step 1, token.weight and others",
        "faults._classify_missing_update",
    ),
    "some-old-parameters": Case(
        "pytorch/pytorch#149205",
        "A forward of an FSDP2 model before its optimizer was made left the optimizer with other parameters than those "
        "of training, perhaps some layers' only.",
        "parameters left out",
        "step 1, blocks.0.norm1.weight and others",
        "faults._classify_missing_update",
    ),
    "reduced-before-last": Case(
        "deepspeedai/DeepSpeed!7985",
        "BF16_Optimizer under ZeRO-1 added the last microbatch's gradient to its fp32 accumulator after that had been "
        "reduced, and each rank kept its own (measured there: 0.2206 and 0.2123, and 0.1942 on both when repaired).",
        "a microbatch not reduced",
        "step 1, token.weight and others",
        "faults._classify_uneven_mix",
    ),
    "mean-of-means": Case(
        "huggingface/transformers!34191",
        "With accumulation each microbatch's mean over its own tokens counted alike, however many tokens it had.",
        "microbatches that count alike",
        "step 1, backward head (rank 0, microbatch 1)",
        "faults._classify_equal_weights",
        always=True,
    ),
    "clip-inverted": Case(
        "deepspeedai/DeepSpeed!5150",
        "clip_grad_norm_ took the larger of 1 and the coefficient (torch.max for torch.min): no gradient was clipped, "
        "and small ones were scaled up to the limit.",
        "not clipped",
        "step 1, token.weight and others",
        "update_faults.classify_clip",
        always=True,
    ),
    "clip-scaled": Case(
        "Lightning-AI/pytorch-lightning#9330",
        "Gradients were clipped before they were unscaled, so that what the optimizer got was far below the limit.",
        "clipped while scaled",
        "step 1, backward head (rank 0, microbatch 1)",
        "update_faults.classify_scaled_norm",
    ),
    "clip-per-group": Case(
        "huggingface/transformers!614",
        "The gradients of each parameter group were clipped by the group's own norm.",
        "a norm taken per group",
        "step 1, token.weight and others",
        "update_faults.classify_norm_of_groups",
    ),
    "replicas-counted": Case(
        "ByteDance-Seed/VeOmni#184",
        "With FSDP2 and replicas the squares of the norm were added up over all ranks, and every replica counted.",
        "a norm that counts copies twice",
        "step 1, token.weight and others",
        "mesh_faults.classify_norm",
    ),
    "norm-of-shard": Case(
        "pytorch/torchtitan#766",
        "Each rank logged another norm under FSDP2: that of the shards which it holds (pytorch#170862 likewise).",
        "a norm taken per rank",
        "step 1",
        "faults._classify_norms",
        strategy="parameters",
    ),
    "decay-everything": Case(
        "ServiceNow/Fast-LLM!545",
        "A refactoring dropped the exemption of norms and biases, and they were decayed like matrices.",
        "another weight decay",
        "step 1, blocks.0.norm1.weight and others",
        "update_faults.classify_decay",
        always=True,
    ),
    "bf16-weights": Case(
        "huggingface/accelerate#3979",
        "Since 1.13.0 the upcast to fp32 under FSDP2 did nothing: the weights that the optimizer steps stayed bf16.",
        "weights kept in bf16",
        "step 1, token.weight and others",
        "weight_faults.classify_kept_dtype",
    ),
    "own-start": Case(
        "pytorch/pytorch#75870",
        "FSDP did not broadcast the model as DDP does: ranks that had not been seeded alike began with other weights.",
        "other initial weights",
        "step 1, forward token (rank 1, microbatch 1), backward head (rank 1, microbatch 1)",
        "weight_faults.classify_start",
        always=True,
    ),
    "muon-as-sgd": Case(
        "deepspeedai/DeepSpeed#8441",
        '{"type": "Muon"} without a ZeRO stage ran no Newton-Schulz step at all and trained with plain SGD.',
        "another update",
        "step 1, token.weight and others",
        "update_faults.classify_update",
        task="MuonTexts",
    ),
    "muon-of-part": Case(
        "deepspeedai/DeepSpeed!8090",
        "Under ZeRO-1 and 2 with reduce_scatter, the default, a rank has the reduced gradient of its own partition "
        "only, and Muon orthogonalized matrices of which the rest was the rank's own (issue 7807).",
        "an optimizer that uses a tensor's norm",
        "step 1, token.weight and others",
        "faults._classify_whole_tensor_optimizer",
        strategy="optimizer",
        task="MuonTexts",
    ),
    "adam-is-adamw": Case(
        "deepspeedai/DeepSpeed!844",
        '{"type": "Adam"} is AdamW unless adam_w_mode: false is said, as it is by default since then; '
        "issue 668 had called it error-prone.",
        "another weight decay",
        "step 1, token.weight and others",
        "update_faults.classify_decay",
        task="AdamTexts",
        alive="deepspeed 0.19.8",
    ),
    "bias-of-each-rank": Case(
        "PaddlePaddle/Paddle!35186",
        "A row-parallel linear layer added its bias on every rank, before the parts were added up.",
        "a bias added several times",
        "step 1, forward blocks.0.out (rank 0, microbatch 1), backward head (rank 0, microbatch 1)",
        "mesh_faults._wrong_sum",
        strategy="nothing+tensor2",
    ),
    "bias-gradient-divided": Case(
        "pytorch/torchtitan!4332",
        "A row-wise layer adds bias/ranks on each rank, and the bias got its gradient through that division: too small "
        "by the number of ranks.",
        "divided by the size of tensor",
        "step 1, token.weight and others",
        "mesh_faults._wrong_gradients",
        strategy="nothing+tensor2",
    ),
    "norms-drift": Case(
        "bigscience-workshop/Megatron-DeepSpeed!274",
        "Weights of layer norms, which all ranks of tensor keep whole, drifted apart between the ranks (PR 270).",
        "copies that differ",
        "step 1",
        "mesh_faults._unequal_copies",
        strategy="nothing+tensor2",
    ),
    "norm-gradient-parts": Case(
        "NVIDIA/Megatron-LM#1446",
        "With tensor and sequence parallelism the final norm's gradient was another on each rank: that of the rank's "
        "own positions.",
        "a partial gradient that is not added up",
        "step 1, token.weight and others",
        "mesh_faults._unequal_copies",
        strategy="nothing+tensor2+sequence",
    ),
    "generator-ahead": Case(
        "bigscience-workshop/Megatron-DeepSpeed!276",
        "The data loader, on the first rank of tensor only, drew a seed from the generator of dropout; from then on "
        "the ranks drew other masks.",
        "other dropout masks",
        "step 1",
        "mesh_faults.classify_masks",
        strategy="nothing+tensor2",
    ),
    "tied-apart": Case(
        "uw-syfi/piper#13",
        "A tied embedding on the first and the last stage is two parameters, whose gradients are not added up.",
        "a tied gradient not summed",
        "step 1, token.weight and others",
        "mesh_faults.classify_before_update",
        strategy="nothing+pipeline2",
    ),
    "wiped": Case(
        "NVIDIA-NeMo/Automodel!3530",
        "Stages of a pipeline were set up again whenever the length of the sequences changed, which set gradients to "
        "None between microbatches: only the last one's were left.",
        "a microbatch left out",
        "step 1, token.weight and others",
        "faults._classify_uneven_mix",
        strategy="nothing+pipeline2",
    ),
    "fsdp-of-one-rank": Case("pytorch/pytorch!167178", "TODO", "", "", "", strategy="parameters", task="Texts"),
    "another-tag": Case("deepspeedai/DeepSpeed#8499", "TODO", "", "", "", strategy="parameters", task="Texts"),
    "shard-scaled": Case("NVIDIA/Megatron-LM!3023", "TODO", "", "", "", strategy="nothing", task="Texts"),
    "doubled-each-time": Case("NVIDIA/Megatron-LM#6660", "TODO", "", "", "", strategy="nothing", task="Texts"),
    "accumulated-in-bf16": Case("ISEEKYAN/Megatron-LM#149", "TODO", "", "", "", strategy="nothing", task="Texts"),
    "local-counts": Case("NVIDIA/Megatron-LM#7452", "TODO", "", "", "", strategy="nothing", task="Texts"),
    "step-ahead": Case("NVIDIA/Megatron-LM!5976", "TODO", "", "", "", strategy="nothing", task="Texts"),
    "uncorrected": Case("allenai/OLMo-core!317", "TODO", "", "", "", strategy="nothing", task="Texts"),
    "head-gradient-partial": Case("pytorch/torchtitan!3412", "TODO", "", "", "", strategy="nothing+tensor2", task="Texts"),
    "attention-without-gradient": Case("deepspeedai/DeepSpeed!8491", "TODO", "", "", "", strategy="nothing+context2", task="Texts"),
    "sequence-loss-times": Case("huggingface/transformers!46775", "TODO", "", "", "", strategy="nothing+context2", task="Texts"),
    "sequence-loss-divided": Case("ByteDance-Seed/VeOmni!338", "TODO", "", "", "", strategy="nothing+context2", task="Texts"),
    "sequence-gradient-divided": Case("deepspeedai/DeepSpeed!5555", "TODO", "", "", "", strategy="nothing+context2", task="Texts"),
    "experts-summed": Case("NVIDIA/Megatron-LM!5956", "TODO", "", "", "", strategy="nothing", task="ExpertTexts"),
    "router-apart": Case("pytorch/torchtitan#2387", "TODO", "", "", "", strategy="nothing", task="ExpertTexts"),
    "balance-times-accumulation": Case("NVIDIA-NeMo/Automodel!3359", "TODO", "", "", "", strategy="nothing", task="ExpertTexts"),
    "balance-lost": Case("NVIDIA-NeMo/Automodel!1412", "TODO", "", "", "", strategy="nothing", task="ExpertTexts"),
    "absent-slots": Case("huggingface/transformers#48687", "TODO", "", "", "", strategy="nothing", task="ExpertTexts"),
}
