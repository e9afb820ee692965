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

    script: str = ""
    """Script in `tests/corpus/alive` that shows it by the library alone, if it is alive."""

    always: bool = False
    """Whether it is verified whenever tests run; the others are in the sweeps."""


@dataclass(frozen=True)
class Missed:
    """One silent error that `unipar verify` does not find."""

    thread: str
    wrong: str
    why: str
    """Why it is not found."""

    alive: str = ""
    script: str = ""


MISSED = (
    Missed(
        "Lightning-AI/pytorch-lightning#21928",
        "Under FSDP, clip_gradients(error_if_nonfinite=True) of Fabric ignores an infinite norm, and the step makes "
        "weights NaN.",
        "one process has the same infinite gradient, and there is nothing to compare; unipar ends every run at it "
        "(`NonFinite`)",
        alive="lightning 2.6.6",
        script="lightning_ignores_infinity",
    ),
)

CASES: dict[str, Case] = {
    "fsdp-of-one-rank": Case(
        "pytorch/pytorch!167178",
        "FSDP2 ignored set_gradient_divide_factor in a group of one rank, as experts have it if their axis is the "
        "world (pytorch#160285 has the doubled gradients). Since the repair it divides twice if sums are forced, "
        "as gloo needs it, and in fp16.",
        "averaged twice",
        "step 1",
        "faults._classify_factor",
        strategy="parameters",
        alive="torch 2.13.0",
        script="fsdp2_divides_twice",
    ),
    "another-tag": Case(
        "deepspeedai/DeepSpeed#8499",
        "Under ZeRO-3, load_checkpoint(tag=..., load_optimizer_states=False) loads the weights of the latest "
        "checkpoint, and returns the path and the client state of the one that was asked for.",
        "other initial weights",
        "step 1, forward token (rank 0, microbatch 1), backward head (rank 0, microbatch 1)",
        "weight_faults.classify_start",
        strategy="parameters",
        alive="deepspeed 0.19.8",
        script="deepspeed_another_tag",
    ),
    "norm-of-own-experts": Case(
        "deepspeedai/DeepSpeed#8475",
        "Under ZeRO-0 with AutoEP, each rank takes the norm of all dense gradients and of its own experts', and the "
        "clip uses the mean of these norms (re-created: AutoEP names the parameters of experts otherwise).",
        "a norm that leaves something out",
        "step 1, token.weight and others",
        "mesh_faults.classify_norm",
        task="ExpertTexts",
        alive="deepspeed 0.19.8",
        script="deepspeed_norm_of_experts",
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
        script="accelerate_schedule_ahead",
        always=True,
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
        script="deepspeed_adam_is_adamw",
    ),
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
    "shard-scaled": Case(
        "NVIDIA/Megatron-LM!3023",
        "Megatron-FSDP divided the accumulated shard of a gradient by the data ranks, instead of the new gradient "
        "that was added to it: of a step's microbatches each counted that many times more than the one before.",
        "microbatches that count differently",
        "step 1, token.weight and others",
        "faults._classify_uneven_mix",
        always=True,
    ),
    "doubled-each-time": Case(
        "NVIDIA/Megatron-LM#6660",
        "A reduction in a group of one rank (experts whose axis is the world) added Megatron-FSDP's buffer to "
        "itself, so that gradients doubled in every microbatch.",
        "microbatches that count differently",
        "step 1, token.weight and others",
        "faults._classify_uneven_mix",
    ),
    "accumulated-in-bf16": Case(
        "ISEEKYAN/Megatron-LM#149",
        "Microbatches were added up in bf16 and the sum reduced in fp32: with accumulation the norm was off by "
        "3.5e-5 from the first step on, and that of both other optimizers by 3e-8.",
        "rounded to bf16",
        "step 1, token.weight and others",
        "faults._classify_factor",
    ),
    "local-counts": Case(
        "NVIDIA/Megatron-LM#7452",
        "process_mtp_loss divides by the tokens of its own rank, and a mean over ranks follows: a gradient of 14/3 "
        "where 4 is right.",
        "ranks that count alike",
        "step 1, backward head (rank 0, microbatch 1)",
        "faults._classify_equal_weights",
    ),
    "step-ahead": Case(
        "NVIDIA/Megatron-LM!5976",
        "fully_shard_optimizer() makes the optimizer's states by a step without gradients, and that step counted: "
        "the first update was 1.34 times too small (issue 5974).",
        "another step count",
        "step 1, token.weight and others",
        "update_faults.classify_step_count",
        always=True,
    ),
    "uncorrected": Case(
        "allenai/OLMo-core!317",
        "SkipStepAdamW never counted its steps and corrected nothing for bias, which made the rate 2.2 times what "
        "it was set to.",
        "another update",
        "step 1, token.weight and others",
        "update_faults.classify_update",
    ),
    "head-gradient-partial": Case(
        "pytorch/torchtitan!3412",
        "With tensor parallelism and a loss in chunks, the gradient of the head's input was each rank's part of "
        "the sum, and was labelled as the whole: loss far above that of one GPU.",
        "a partial gradient that is not added up",
        "step 1, backward norm (rank 0, microbatch 1)",
        "mesh_faults._partial_backward",
        strategy="nothing+tensor2",
    ),
    "attention-without-gradient": Case(
        "deepspeedai/DeepSpeed!8491",
        "torch.compile took the exchange of Ulysses for a function of nothing: queries, keys and values got no "
        "gradient, with the right loss and without a warning.",
        "no gradient",
        "step 1, backward positions (rank 0, microbatch 1)",
        "faults._classify_no_gradient",
        strategy="nothing+context2",
    ),
    "sequence-loss-times": Case(
        "huggingface/transformers!46775",
        "The number of tokens, already that of all ranks, was divided by the ranks that split a sequence: loss and "
        "gradients were sp_size times too large.",
        "a loss counted more than once",
        "step 1, backward head (rank 0, microbatch 1)",
        "mesh_faults._loss_counted_twice",
        strategy="nothing+context2",
    ),
    "sequence-loss-divided": Case(
        "ByteDance-Seed/VeOmni!338",
        "The loss was scaled by the data ranks without those that split a sequence: it was sp_size times too small.",
        "divided by the size of context",
        "step 1, backward positions (rank 0, microbatch 1)",
        "mesh_faults._wrong_gradients",
        strategy="nothing+context2",
    ),
    "sequence-gradient-divided": Case(
        "deepspeedai/DeepSpeed!5555",
        "Under ZeRO-0 gradients were divided by all ranks, those included that split a sequence: with four of them "
        "the norm was 3.956 where ZeRO-1 had 15.825.",
        "divided by the size of context",
        "step 1, backward positions (rank 0, microbatch 1)",
        "mesh_faults._wrong_gradients",
        strategy="nothing+context2",
    ),
    "experts-summed": Case(
        "NVIDIA/Megatron-LM!5956",
        "Experts get tokens, and so gradients, from all ranks of their axis, and Megatron-FSDP v2 took the mean "
        "over their copies alone: ep_size times too large (likewise pytorch#160285, VeOmni PR 185, megablocks PR "
        "20).",
        "not averaged, of some parameters",
        "step 1, token.weight and others",
        "faults._classify_part",
        task="ExpertTexts",
    ),
    "router-apart": Case(
        "pytorch/torchtitan#2387",
        "The router's gradient was not added up over the ranks that share its tokens, and its weights were others "
        "on each rank after the first step.",
        "not reduced, of some parameters",
        "step 1, token.weight and others",
        "faults._classify_part",
        task="ExpertTexts",
    ),
    "balance-times-accumulation": Case(
        "NVIDIA-NeMo/Automodel!3359",
        "The loss that balances experts entered the backward of every microbatch without a division by their number.",
        "an auxiliary loss counted several times",
        "step 1, backward experts.balance (rank 0, microbatch 1)",
        "expert_faults.classify_backward",
        task="ExpertTexts",
    ),
    "balance-lost": Case(
        "NVIDIA-NeMo/Automodel!1412",
        "MoEAuxLossAutoScaler.apply() was called and its result not used: the loss that balances experts had no "
        "gradient (issue 1408).",
        "another backward",
        "step 1, backward experts.balance (rank 0, microbatch 1)",
        "faults._classify_backward",
        task="ExpertTexts",
    ),
    "absent-slots": Case(
        "huggingface/transformers#48687",
        'With experts_implementation="batched_mm" the router got a gradient for slots whose experts are on another '
        "rank: their weight of zero hides them in the forward only (PR 48689).",
        "another backward",
        "step 1, backward experts.router (rank 0, microbatch 1)",
        "faults._classify_backward",
        task="ExpertTexts",
    ),
    "more-digits": Case(
        "pytorch/torchtitan!3558",
        "With GraphTrainer, layers that were to compute in MXFP8 fell back to bf16 without a word (here: to fp32 from "
        "bf16-mixed).",
        "more digits than asked for",
        "step 1, token.weight and others",
        "faults._classify_digits",
        task="MixedTexts",
    ),
}
