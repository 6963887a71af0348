"""TransformersTarget: an unmodified transformers decoder as a target.

A runner (:mod:`specdec.runners`) computes its forwards. ``modules`` calls the live model's own forward as a whole, and
follows whatever is done to it. ``fused`` and ``native`` read its weights and run its layers themselves, which makes
early exits and entries possible. At load every runner is compared with the model's own forward, and a model that cannot
be driven exactly is refused by name.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from accelerate.utils import align_module_device
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from specdec.costs.curve import CostCurve
from specdec.costs.machine import Threads, processor
from specdec.costs.measuring import describe, kept_curve, measure, new_curve, stored_at
from specdec.errors import ConfigError, SpecdecError, TargetError, check_choice, first_line
from specdec.models.around_layers import CALLED, LOOP, Whole
from specdec.models.inspection import (
    context_length_of,
    decoder_parts,
    device_of,
    eos_ids_of,
    last_norm,
    refuse_unfit,
    weight_of,
    weights_in,
)
from specdec.models.loading import check_place, load_weights
from specdec.models.long_context import bound_context
from specdec.models.masks import MASKS, layer_masks, named_limits, register_masks, whole_masks, window_of
from specdec.models.self_check import (
    PROBE,
    ProbeLayer,
    Reference,
    ShadowLayer,
    note_layer,
    own_logits,
    tokens_for,
)
from specdec.native.library import compiler, library, products
from specdec.runners import ACTIVATIONS, ATTENTIONS, EXECUTIONS
from specdec.runners.attention import ATTENTION, check_runs, describe_backend, layer_attention
from specdec.runners.block_weight import BlockWeight
from specdec.runners.boundary_ops import Joint, Joints, read_joints
from specdec.runners.choice import TIMED_ROWS, Plan, RunnerMaker, choose_runner
from specdec.runners.half_layers import Without, half_layers, native_half_layers
from specdec.runners.known_layers import in_blocks, why_special
from specdec.runners.linear import (
    DenseLinear,
    HeadOf,
    LinearKernel,
    PackedLinear,
    PackedModule,
    PackedWeight,
    TiedEmbedding,
    linear_kernel,
)
from specdec.runners.native import NativeRunner
from specdec.runners.packed_step import MOST_REPLAYED
from specdec.runners.recording import Recording
from specdec.runners.replicas import Evaluated, Replicas
from specdec.runners.rows import Rows
from specdec.runners.runner import LayerRunner
from specdec.runners.sent_rows import rows_on
from specdec.runners.snapshot import Outline, Snapshot
from specdec.runners.visibility import bucket
from specdec.runners.whole_model import WholeModelRunner
from specdec.sampling.sampler import Sampler
from specdec.settings.arguments import checked
from specdec.settings.copies import NotCopied
from specdec.settings.files import cache_folder
from specdec.step import device_copies, torch_switches
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.first_time import FirstTimes
from specdec.step.joining import beginning, joined
from specdec.step.pages import PAGE
from specdec.step.step_io import NOTHING, Entering, LayerPlan, Part, StepInput, Wanted
from specdec.step.step_output import StepOutput

__all__ = ["TransformersTarget", "time_runners"]

_WHAT_FOLLOWS = "texts may part from plain decoding's where two logits are as good as equal"
_WARM_ROWS = 64  # of several sequences, in steps that are recorded beforehand
_PAGES_SHARE = 0.9  # of the bytes that a device has left; vLLM's gpu_memory_utilization is the same by default

for _name, _function in ((ATTENTION, layer_attention), (PROBE, note_layer)):
    AttentionInterface.register(_name, _function)
register_masks()


class TransformersTarget(NotCopied):
    """An unmodified transformers decoder.

    Args:
        model: any ``...ForCausalLM`` whose layers are attention and MLP.
        execution: which code runs the layers. ``auto``: the fastest exact runner for a model that specdec owns, else
            ``modules``. ``modules``: the model's own forward as a whole (:mod:`specdec.runners.whole_model`).
            ``fused``: fewer torch operations for known layers. ``native``: all layers in one call of C, on a CPU.
        attention: ``flash``: ``fused`` layers on a GPU, with flash-attn's kernel (:mod:`specdec.runners.attention`).
        owned: only this target uses the model, so its weights may be repacked in place instead of copied. The model
            still computes, saves and copies the same values, but more slowly by itself, and packed weights cannot be
            changed. ``plain_model`` returns an unpacked copy.
        progress: called with the share that is done while steps are timed, once per machine and model.

    A model that is not owned is never changed; ``fused`` and ``native`` hold copies of its linear layers' weights.
    ``modules`` follows later changes of weights, modules and hooks. The others read the model once, and after such a
    change the next generation raises TargetError. Where they call a part of the model, they call a replica of it
    (:mod:`specdec.runners.replicas`) in eval mode.

    Raises:
        ConfigError: an unknown choice, or the named runner cannot run this model.
        TargetError: the model cannot be driven exactly; the message names the part.
        NumericalError: its own logits are NaN or infinite.
        ForkError: see :class:`specdec.costs.machine.Threads`.
    """

    shared = False
    instead = (
        "share it: Engine(target, ...); in another process (started by 'spawn') load a new one: "
        "TransformersTarget.from_pretrained(...); plain_model() gives a model that can be copied"
    )

    @torch_switches.makes
    @checked
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        execution: str = "auto",
        attention: str = "auto",
        owned: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.backend = check_choice("attention", attention, ATTENTIONS)
        check_choice("execution", execution, EXECUTIONS)
        Threads.check()
        self.model = model
        self.name = type(model).__name__
        self.config = config = model.config.get_text_config()
        refuse_unfit(self.name, config)
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if embedding is None or head is None:
            raise TargetError(f"{self.name} has no embedding and head of its own; load a ...ForCausalLM")
        if not all(isinstance(store, BlockWeight) for store in _stores(model)):
            raise TargetError(
                f"the weights of this {self.name} were laid out anew by the target that owns it; share that target "
                "(Engine(target, ...), custom_generate's target=), or make another one of its plain_model()"
            )
        self.hidden_size = int(config.hidden_size)
        self.num_layers = int(config.num_hidden_layers)
        self.context_length = context_length_of(config)
        self.eos_ids = eos_ids_of(model)
        self.device, self.dtype = device_of(embedding), weight_of(embedding).dtype
        self.head_device = device_of(head)
        self._parameters = weights_in(model)
        self._plain: weakref.ref[PreTrainedModel] | None = None
        self._weights: str | None = None
        self._halves = dict[Without, LayerRunner | None]()
        self._joints: Joints | None = None
        self.runner: LayerRunner
        self.specs: list[LayerSpec]
        self._reference: Reference
        self.options: dict[str, Any] = {"attention": attention}
        if self.activations is not None:
            self.options["activations"] = self.activations
        self._find_parts()
        tokens = tokens_for(len(weight_of(embedding)))
        expected = own_logits(model, self, tokens)
        self.vocab_size = int(expected.shape[-1])
        self.plan = self._choose(expected, tokens, execution, attention, owned=owned, progress=progress)
        self.runner, self.options["runner"] = self.plan.runner, self.plan.runner.name
        with self.active():
            self.runner.measure_rows(self.specs)
        del self._reference
        self._around = self._outlines()

    def _find_parts(self) -> None:
        """Find the decoder, its layers and its last norm, as far as specdec knows them; heads and other runners do."""
        model: Any = self.model
        self.decoder: nn.Module = model
        self._norm: nn.Module | None
        self.layers, self._norm = nn.ModuleList(), None
        self.layer_weights = self._parameters - weights_in(model.get_input_embeddings())
        self._unread: TargetError | None = None
        try:
            self.decoder, self.layers, self._norm = decoder_parts(self.name, model)
            self.num_layers, self.layer_weights = len(self.layers), weights_in(self.layers)
        except TargetError as error:
            self._unread = error
        self.whole = Whole(model, self.decoder)

    def _choose(
        self,
        expected: torch.Tensor,
        tokens: Sequence[int],
        execution: str,
        attention: str,
        *,
        owned: bool,
        progress: Callable[[float], None] | None,
    ) -> Plan:
        """Make the runner, whose logits are those of the model."""
        modules = partial(self._run_whole, expected, tokens)
        named = "fused" if execution == "auto" and attention != "auto" else execution
        asked = f"attention={attention!r}" if execution == "auto" else f"execution={execution!r}"
        if named == "modules" or (named == "auto" and not owned):
            if attention != "auto":
                raise ConfigError(f"{asked} runs the model's own attention; leave attention={attention!r} at auto")
            reason = "the model was handed in, and is followed; name execution= to have a copy of its weights packed"
            return Plan(modules(), "it was asked for" if named == "modules" else reason, {})
        maker, others, why = None, dict[str, str](), ""
        try:
            maker = self._maker(owned)
            reasons = ((name, maker.why_not(name)) for name in ("native", "fused"))
            others = {name: reason for name, reason in reasons if reason is not None}
            if named in others or len(others) > 1:
                raise TargetError(others[named if named in others else "fused"])
            self._walk(maker, expected, tokens, attention)
        except TargetError as error:
            if named != "auto":
                raise ConfigError(f"{asked} cannot run this model: {error}; leave it at auto") from error
            maker, why = None, str(error)
        if maker is None:
            return Plan(modules(), why, others)
        plan = choose_runner(
            maker,
            named,
            modules=modules,
            differs=self._differs,
            kept=self._kept_seconds,
            seconds=partial(self._seconds, progress),
        )
        return plan if execution == named else replace(plan, reason=others.get("native", asked), others=others)

    def _maker(self, owned: bool) -> RunnerMaker:
        """What makes runners of the model's layers.

        Raises:
            TargetError: its layers are not known, or code around them does what such a runner would lose.
        """
        if self._unread is not None:
            raise self._unread
        if getattr(self.decoder, "rotary_emb", None) is None:
            raise TargetError(f"{self.name} has no rotary_emb; specdec drives decoders with rotary positions")
        self.whole.check_calls()
        assert self._norm is not None
        return RunnerMaker(self.model, self.decoder, self.layers, self._norm, self.config, owned=owned)

    def _walk(self, maker: RunnerMaker, expected: torch.Tensor, tokens: Sequence[int], attention: str) -> None:
        """Read what the layers cache, and how they round, by running them one by one.

        Raises:
            TargetError: the model cannot be walked; the message names the part.
        """
        self._rotary = maker.rotary
        try:
            self.runner = maker.make("walk")
            self._joints = self._read_joints(tokens)
            self.specs = self._with_windows(self._read_specs(maker, tokens[0]), tokens[0])
            check_runs(attention, self.specs)
            self._reference = Reference(self.model, expected, self, self.specs, tokens)
            with self.runner.every_expert():
                self._reference.check_modules(partial(self._shadow, maker) if self._has_shadow() else None)
        except SpecdecError:
            raise
        except Exception as error:  # code of others, called in a way of ours: it may raise anything
            raise TargetError(
                f"{self.name} cannot be walked layer by layer: {type(error).__name__}: {first_line(error)}"
            ) from error

    def _run_whole(self, expected: torch.Tensor, tokens: Sequence[int]) -> LayerRunner:
        """The runner of the model's own whole forward, if that computes its logits over a tree.

        Raises:
            TargetError: it cannot be called so, or how the logits differ.
        """
        self._joints = None
        try:
            masks = whole_masks(self.model)
            norm = None if self._unread is not None else partial(last_norm, self.name, self.model)
            runner = WholeModelRunner(self.model, norm, self.num_layers, self.device, masks, tokens)
            self.runner, self.specs, self.options["runner"] = runner, runner.specs, runner.name
            self._reference = Reference(self.model, expected, self, self.specs, tokens)
            off = self._differs(runner)
        except SpecdecError:
            raise
        except Exception as error:  # as above
            off = f"it fails: {type(error).__name__}: {first_line(error)}"
        if off is not None:
            raise TargetError(
                f"{self.name}: the logits of its own forward over a tree are not those of each path: {off}; it is "
                "refused rather than decoded wrongly, so use plain generate"
            )
        return runner

    def _check_again(self) -> None:
        """Raises TargetError where a forward that was replaced since does not compute each path's logits of a tree."""
        tokens = tokens_for(self.vocab_size)
        with torch_switches.loading():
            try:
                self._reference = Reference(self.model, own_logits(self.model, self, tokens), self, self.specs, tokens)
                off = self._differs(self.runner)
            except SpecdecError:
                raise
            except Exception as error:  # code of others
                off = f"it fails: {type(error).__name__}: {first_line(error)}"
            finally:
                vars(self).pop("_reference", None)
        if off is not None:
            raise TargetError(
                f"the forward of {self.name}, or its attention, was changed after it was loaded, and its logits over a "
                f"tree are not those of each path: {off}; put it back, or use plain generate"
            )

    def _outlines(self) -> Sequence[Outline | Snapshot]:
        """What no runner follows."""
        embedding: Any = self.model.get_input_embeddings()
        if self.runner.whole:  # its masks were read of the config, and its caches are on its devices
            return (Outline((), self.config, embedding),)
        fixed = self._rotary.module.modules() if self._rotary.fixed else ()
        around = Outline((self.model, self.decoder), self.config, embedding)
        return around, Snapshot(fixed, root=self.model, everywhere=False)

    @classmethod
    @torch_switches.makes
    @checked
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        device_map: str | dict[str, Any] | None = None,
        execution: str = "auto",
        attention: str = "auto",
        activations: str = "default",
        trust_remote_code: bool = False,
        revision: str | None = None,
        subfolder: str | None = None,
        max_model_len: int | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> TransformersTarget:
        """Load a checkpoint: a named model, a folder or hub id (safetensors only), or a GGUF file.

        ``activations="int8"`` rounds the rows that a GGUF file's quantised blocks are multiplied with to 8 bits, 32
        values at a time: faster, and another model than the default, which rounds less than bfloat16 does.
        ``max_model_len`` is the most tokens of a text; for more than its original context a model takes the rotary
        factors that it has for long texts, in all texts and from the first token.

        Raises:
            ConfigError: an unknown choice, or there are no quantised blocks whose rows could be rounded.
            CheckpointError: no model there, a broken file, or tensors missing or left over.
            TargetError: a model that specdec cannot drive.
        """
        check_choice("execution", execution, EXECUTIONS)
        check_choice("activations", activations, ACTIVATIONS)
        check_choice("attention", attention, ATTENTIONS)
        check_place(device, device_map)
        model, weights = load_weights(
            path,
            dtype=dtype,
            device=device,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            revision=revision,
            subfolder=subfolder,
            max_model_len=max_model_len,
            in_blocks=execution in ("auto", "native") and attention == "auto",
            activations=activations,
        )
        target = cls(model, execution=execution, attention=attention, owned=True, progress=progress)
        target._weights = weights
        bound_context(target, max_model_len)
        return target

    def __copy__(self) -> TransformersTarget:
        """A target of the same weights, whose attributes may be set apart."""
        return self._sharing()

    @property
    def activations(self) -> str | None:
        """``int8`` where activations are rounded to it before products with quantised blocks, else None."""
        return "int8" if any(isinstance(store, BlockWeight) and store.int8 for store in _stores(self.model)) else None

    @property
    def batch_invariant(self) -> bool:
        return self._varies() is None

    def _varies(self) -> str | None:
        """Why a row's numbers depend on the rows beside it, or None."""
        if self.runner.varies is None and self.backend != "auto":
            return f"attention={self.backend!r} asks for kernels that sum in another order for other numbers of rows"
        return self.runner.varies

    def new_cache(self, *, capacity: int, rows: int) -> KVCache:
        if not self.pages:
            return KVCache(self.specs, capacity=capacity, rows=rows)
        return self.runner.new_cache(self.specs, capacity=capacity, rows=rows)

    @property
    def pages(self) -> bool:
        """Whether caches are in pages; kernels by name read none."""
        return self.runner.pages and self.backend == "auto"

    def warm_up(
        self,
        rows: int,
        *,
        sequences: int = 1,
        taps: Collection[int] = (),
        exit_layer: int | None = None,
        levels: int = 0,
    ) -> None:
        """Choose how products are cut, and run steps of every bucket, so that no later one has to compile or record it.

        Args:
            rows: most rows of a sequence's step.
            sequences: most sequences of a step. Several have up to 64 rows together, or one each.
            taps: hidden layers that the steps return.
            exit_layer: the layer before which passes leave, and at which the steps enter; None for none.
            levels: most rows of a tree whose levels are run one after the other; 0 for none.
        """
        sizes = [1 << power for power in range(bucket(max(rows, levels)).bit_length())]
        caches = [self.new_cache(capacity=1, rows=sizes[-1]) for _ in range(bucket(sequences))]

        def rows_for(count: int, each: int, whole: int, **asked: Any) -> StepInput:
            """The last ``each`` of a chain's ``whole`` rows, for ``count`` sequences; a part is marked as a tree."""
            tree = (range(-1, whole - 1), range(whole)) if each < whole else None
            own = [StepInput.of(cache, [0] * each, tree, first=whole - each, **asked) for cache in caches[:count]]
            return joined(own)

        plan, wanted = LayerPlan(exit_layer), Wanted(hidden=taps)
        with self.active():
            most = min(bucket(max(rows, sequences)), MOST_REPLAYED)
            alone = self.new_cache(capacity=1, rows=most)
            self.runner.choose_cuts(
                lambda count: rows_on(self.device, StepInput.of(alone, [0] * count), self.backend), most
            )
            for count, each in itertools.product((1 << power for power in range(len(caches).bit_length())), sizes):
                if count > 1 and each > 1 and count * each > _WARM_ROWS:
                    continue
                if each <= bucket(rows) and exit_layer is None:
                    self.forward(rows_for(count, each, each, wanted=wanted))
                elif each <= bucket(rows):
                    early = self.forward(rows_for(count, each, each, plan=plan, wanted=NOTHING)).out
                    entering = Entering(exit_layer or 0, early[:each])
                    self.forward(rows_for(count, each, each, wanted=wanted, entering=entering))
                for whole in (size for size in sizes if each < size <= bucket(levels or 1)):
                    self.forward(rows_for(count, each, whole, plan=plan))

    def active(self) -> AbstractContextManager[None]:
        Threads.check()
        return torch_switches.steps(autocast=self.runner.whole)  # the model is called as it is

    def forward(self, step: StepInput) -> StepOutput:
        first_times, plan = FirstTimes.seen, step.plan
        if self.runner.whole:
            if step.entering is not None or plan.parts or plan.last not in (None, self.num_layers):
                raise self._no_layers("the drafter")
            output = self._finish(None, rows_on(self.device, step), 0, self.num_layers, Joints())
        elif step.entering is not None:
            output = self._run_stages(step, step.entering)
        elif plan.parts:
            output = self._run(step, 0, plan.last, None)
        else:
            last = self.num_layers if plan.last is None else plan.last
            output = self._run_layers(rows_on(self.device, step, self.backend), 0, last, None)
        output.first_time = FirstTimes.seen != first_times
        return output

    def _run_stages(self, step: StepInput, entering: Entering) -> StepOutput:
        """Rows with hidden states join at their layer; the other rows are run up to that layer first."""
        layers: Any = entering.layer
        stages, wanted = sorted({*layers}), Wanted(NOTHING.logits, 0, step.wanted.hidden)
        hidden, found, given = None, dict[int, torch.Tensor](), iter(entering.hidden)
        for layer, after in zip(stages, (*stages[1:], step.plan.last), strict=True):
            joining = [next(given) for one in layers if one == layer >= 0]
            parts = joining if hidden is None else [hidden, *joining]
            brought = None if not parts else parts[0] if len(parts) == 1 else torch.cat(parts)
            own = step if layer == stages[-1] else beginning(step, sum(one <= layer for one in layers), wanted)
            output = self._run(own, max(layer, 0), after, brought)
            hidden = output.out
            found |= output.hidden
        output.hidden = found
        return output

    def _run(self, step: StepInput, first: int, last: int | None, hidden: torch.Tensor | None) -> StepOutput:
        """Rows through layers [first, last), None for all; ``hidden``: of rows that do not begin with their tokens."""
        rows, last = rows_on(self.device, step, self.backend), self.num_layers if last is None else last
        if step.plan.parts:
            return self._run_parts(rows, first, last, hidden)
        return self._run_layers(rows, first, last, hidden)

    def _run_layers(self, rows: Rows, first: int, last: int, hidden: torch.Tensor | None) -> StepOutput:
        runner, taps = self.runner, rows.step.wanted.hidden
        if hidden is None and not (runner.looks_up and self.joints.plain):
            hidden = self.joints.embedding(runner.enter(rows))
        if last == self.num_layers:
            return self._finish(hidden, rows, first, last, self.joints)
        hidden, found = runner.run(hidden, rows, first, last, taps)
        return _sent(StepOutput(out=hidden, hidden=found), rows, last)

    def _finish(self, hidden: torch.Tensor | None, rows: Rows, first: int, last: int, joints: Joints) -> StepOutput:
        """Rows through the last layers, the last norm and the head."""
        return _sent(self.runner.finish(hidden, rows, first, last, joints), rows, last)

    def check_layers(self, asked: str) -> None:
        """Raises ConfigError where some layers, or parts of them, cannot be run by themselves, as ``asked`` does."""
        if self.runner.whole:
            raise self._no_layers(asked)

    def _no_layers(self, asked: str) -> ConfigError:
        """What to say where some of the layers are to be run."""
        return ConfigError(
            f"{asked} runs some of the target's layers, and this {self.name} is run by its own forward as a whole "
            f"(execution 'modules': {self.plan.reason}); name execution='native' or 'fused' where its layers are like "
            "Llama's, or choose a drafter that does not, such as lookahead, medusa or eagle"
        )

    def _run_parts(self, rows: Rows, first: int, last: int, hidden: torch.Tensor | None) -> StepOutput:
        """The same where parts of layers are left out."""
        for parts, begin, end in rows.step.plan.runs(first, last):
            if hidden is None and (begin or parts is not Part.BOTH):
                hidden = self.embed(rows.step.ids)
            if parts is not Part.BOTH:
                halves = self.half_layers("mlp" if parts is Part.ATTENTION else "attention")
                assert halves is not None
                hidden, _ = halves.run(hidden, rows, begin, end, ())
            elif end == self.num_layers:
                return self._run_layers(rows, begin, end, hidden)
            else:
                hidden = self._run_layers(rows, begin, end, hidden).out
        hidden = self.embed(rows.step.ids) if hidden is None else hidden
        # Where the last layer is left out, wholly or in part, the head reads what came before.
        ends = last == self.num_layers and not rows.step.wanted.nothing
        return StepOutput(
            self.head(self.norm(hidden)) if ends else None, rows.step.wanted.scored, out=hidden, sent=rows
        )

    def half_layers(self, without: Without) -> LayerRunner | None:
        """A runner of all layers without their attention or their MLP; None where they cannot be run so."""
        if self.runner.whole:
            return None
        if without not in self._halves and isinstance(self.runner, NativeRunner):
            self._halves[without] = native_half_layers(self.runner, without)
        elif without not in self._halves:
            self._halves[without] = half_layers(self._maker(owned=False), without)
        return self._halves[without]

    def embed(self, tokens: torch.Tensor | Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        if not isinstance(tokens, torch.Tensor):
            if isinstance(self.runner.embed, TiedEmbedding):
                return self.joints.embedding(self.runner.embed.look_up(tokens))
            tokens = torch.tensor(tokens)
        return self.joints.embedding(self.runner.embed(tokens.to(self.device)[None])[0])

    @property
    def embedding_rows(self) -> PackedWeight | torch.Tensor | None:
        """The weight [V, D] whose rows are embeddings; None where more is done to them, or only a module can tell."""
        embedding: Any = self.runner.embed
        if self.joints.embedding != Joint():
            return None
        if isinstance(embedding, TiedEmbedding):
            return embedding.store if embedding.scale is None else None
        module: Any = self.model.get_input_embeddings()
        plain = type(module) is nn.Embedding and module.max_norm is None and why_special(module) is None
        weight: torch.Tensor | None = module.weight.detach() if plain else None
        return weight

    @property
    def recording(self) -> Recording | None:
        """What drafters on the target's device have their passes recorded by; None where nothing is recorded."""
        return self.runner.recording

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.runner.norm(hidden)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.joints.logits(self.runner.head(self.joints.hidden(hidden)))

    @property
    def packed_head(self) -> PackedWeight | None:
        """The packed weight that the head multiplies hidden states with; None where it is not packed, or does more."""
        packed: PackedWeight | None = getattr(self.runner.head, "packed", None)
        return packed if packed is not None and self.joints.plain else None

    def head_of(
        self, tokens: torch.Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """As :meth:`Target.head_of`, of all tokens for None; with a ``dtype`` gradients may pass, as in training."""
        head: Any = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        plain = type(head) in (nn.Linear, PackedLinear) and head.bias is None and why_special(head) is None
        if not plain:  # only the head's own module knows what it does to its logits
            every = slice(None) if tokens is None else tokens
            return lambda hidden: self.head(hidden.to(self.dtype))[..., every]
        if tokens is None and dtype is None and in_blocks(head):
            return HeadOf(head.store, self.joints)
        weight = head.weight.detach()
        weight = weight if tokens is None else weight[tokens.to(self.head_device)]
        kernel: LinearKernel = linear_kernel(weight) if dtype is None else DenseLinear(weight.to(dtype))
        return HeadOf(kernel, self.joints)

    def greet(self, sampler: Sampler, **others: Any) -> None:
        """As :meth:`Target.greet`: one process agrees with itself."""

    def check_unchanged(self) -> None:
        """Called before every generation.

        Raises:
            TargetError: the model was changed since its runner read it.
            ForkError: this process cannot run it, see :class:`specdec.costs.machine.Threads`.
        """
        Threads.check()
        self.whole.check_methods(LOOP)
        if not self.runner.whole:
            self.whole.check_methods(CALLED)
        self.runner.look()
        if isinstance(self.runner, WholeModelRunner) and self.runner.renewed():
            self._check_again()
        around = next((what for one in self._around if (what := one.changed()) is not None), None)
        changed = around or self.runner.changed()
        if changed is not None:
            lenient = ", or use execution='modules', which follows edits of weights, modules and hooks"
            raise TargetError(
                f"{self.name} was changed after its {self.runner.name} runner was made, which would not follow: "
                f"{changed}; make a new engine of it{'' if around or self.runner.borrows else lenient}"
            )

    def version(self) -> object:
        """Where parameters and buffers are, how often they were written to, and which adapters of peft are active."""
        weights = tuple(map(_state, chain(self.model.parameters(), self.model.buffers())))
        adapted = (own for module in self.model.modules() if "_active_adapter" in (own := vars(module)))
        return weights, tuple((str(own["_active_adapter"]), own.get("_disable_adapters")) for own in adapted)

    def plain_model(self) -> PreTrainedModel:
        """The model as transformers made it: ``model`` itself, or where weights were repacked, a copy with its own."""
        if not any(isinstance(module, PackedModule) for module in self.model.modules()):
            return self.model
        plain = self._plain() if self._plain is not None else None
        if plain is None:
            plain = copy.deepcopy(self.model)
            plain.tie_weights()
            self._plain = weakref.ref(plain)  # callers share it, and it goes with the last of them
        return plain

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's parameters, sorted by transformers' names; repacked and offloaded ones are brought in turn."""
        sources: dict[str, Any] = dict(self.model.named_parameters())
        head: Any = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        tied = any(
            isinstance(module, TiedEmbedding) and module.store is getattr(head, "store", None)
            for module in self.model.modules()
        )
        for name, module in self.model.named_modules():
            # A head that shares its weight with the embedding goes by the embedding's name, as in transformers.
            if isinstance(module, PackedModule):
                kinds = [kind for kind in module.names if not (tied and module is head and kind == "weight")]
                sources |= {f"{name}.{kind}": module for kind in kinds if getattr(module, kind) is not None}
        for name in sorted(sources):
            source, (owner, _, kind) = sources[name], name.rpartition(".")
            if not isinstance(source, torch.Tensor):
                yield name, getattr(source, kind)
            elif source.is_meta:
                with align_module_device(module := self.model.get_submodule(owner)):
                    yield name, getattr(module, kind)
            else:
                yield name, source

    def describe(self) -> dict[str, dict[str, Any]]:
        """What runs, and why: section -> name -> value."""
        found = library() if self.device.type == "cpu" else None
        return {
            "model": {
                "class": self.name,
                "layers": self.num_layers,
                "hidden size": self.hidden_size,
                "vocabulary": self.vocab_size,
                "context": self.context_length,
                "parameters": self._parameters,
                "weights": self._weights,
                "activations": self.options.get("activations"),
                "dtype": str(self.dtype).removeprefix("torch."),
                "device": str(self.device),
                "between its parts": None if self._joints is None else str(self._joints) or None,
            },
            "execution": {
                "runner": self.runner.name,
                "because": self.plan.reason,
                **{f"not {name}": reason for name, reason in self.plan.others.items()},
                "experts": self.runner.experts,
                "attention": "in the same call" if self.runner.name == "native" else self._describe_attention(),
                "batch-invariant": "yes" if self.batch_invariant else f"no: {self._varies()}; {_WHAT_FOLLOWS}",
                "CUDA graphs": self.runner.graphs(self.backend) if self.device.type == "cuda" else None,
                "cuts of products": self.runner.cuts(),
                "cache": self._describe_cache(),
                "threads": torch.get_num_threads() if self.device.type == "cpu" else None,
            },
            "machine": {
                "processor": processor(self.device),
                "instructions": torch.backends.cpu.get_cpu_capability(),
                "compiler": compiler(),
                "native library": None if found is None else found._name,
                "native products": products(),
                "CUDA devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
                "cache folder": str(cache_folder()),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }

    def cache_room(self) -> int | None:
        """Bytes that the pages of further texts may have; None where caches are not in pages, and there is no telling.

        It is what is free of the pages that there are, and most of what the device has left. The rest is for what
        forwards compute, and for the drafters' own caches.
        """
        left = device_copies.free_bytes(self.device) if self.pages else None
        return None if left is None else int(_PAGES_SHARE * left) + sum(pool.free_bytes for pool in self.runner.pools)

    def _describe_cache(self) -> str | None:
        """The pages of all texts; None where each text's cache is its own."""
        if not self.pages:
            return None
        pools = self.runner.pools
        used, pages, size = (sum(getattr(pool, name) for pool in pools) for name in ("used", "pages", "nbytes"))
        return f"in pages of {PAGE} tokens; {used} of {pages} in use, {size / 1e6:.1f} MB"

    def _describe_attention(self) -> str:
        if self.runner.whole:
            return f"the model's own ({getattr(self.config, '_attn_implementation', 'of its class')})"
        if self.batch_invariant:
            return "by Triton, cut at fixed positions of the text"
        softcap = getattr(self.config, "attn_logit_softcapping", None)
        return describe_backend(self.backend, self.specs, softcap)

    @property
    def joints(self) -> Joints:
        """The operations of the model between its parts; those of a model that is run as a whole are read when asked.

        Raises:
            TargetError: they are not known, so that its embedding and its head cannot be called by themselves.
        """
        if self._joints is None:
            try:
                if self._unread is not None:
                    raise self._unread
                embedding: Any = self.model.get_input_embeddings()
                self._joints = self._read_joints(tokens_for(len(weight_of(embedding))))
            except Exception as error:  # code of others: it may raise anything
                raise TargetError(
                    f"{self.name} is run by its own forward as a whole, and its embedding, last norm and head cannot "
                    f"be called by themselves: {first_line(error)}; choose a drafter that reads tokens alone, such as "
                    "prompt_lookup or lookahead"
                ) from error
        return self._joints

    def _read_joints(self, tokens: Sequence[int]) -> Joints:
        """The operations of the model between its parts, recorded while it runs with its own attention."""
        model: Any = self.model
        ids = torch.tensor([list(tokens)], device=self.device)
        replicas = Replicas(model, whole=True)  # others may call the model meanwhile
        forward = partial(replicas.root, ids, attention_mask=torch.ones_like(ids), use_cache=False)
        places = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
        places |= {"layer": self.layers[0], "norm": self._norm}
        with torch.inference_mode():
            return read_joints(
                self.name, self.config, forward, **{name: replicas.of(at) for name, at in places.items()}
            )

    def _read_specs(self, maker: RunnerMaker, token: int) -> list[LayerSpec]:
        """What each layer caches, as seen by an attention function that only looks."""
        specs: list[LayerSpec] = []
        layers = [maker.module_layer(n, ProbeLayer, use_cache=False, note=specs.append) for n in range(self.num_layers)]
        runner = maker.of_layers("walk", list(layers), [])
        with self._using(runner), torch.inference_mode():
            self.forward(StepInput.of(KVCache([], capacity=1, rows=1), [token], wanted=NOTHING))
        if len(specs) != self.num_layers:
            raise TargetError(
                f"{self.name} calls attention {len(specs)} times in {self.num_layers} layers; specdec caches one "
                "list of keys and values per layer"
            )
        return specs

    def _with_windows(self, specs: Sequence[LayerSpec], token: int) -> list[LayerSpec]:
        """Specs with the windows of the masks of the model's own forward."""
        ids = torch.tensor([[token]], device=self.device)
        replicas = Replicas(self.model, attention=MASKS, whole=True)
        with torch.inference_mode():
            masks = layer_masks(
                map(replicas.of, self.layers),
                partial(replicas.root, ids, attention_mask=ids.new_ones(1, 1), use_cache=False),
            )
        windows: dict[Any, int | None] = {}
        found = []
        for spec, sees in zip(specs, masks, strict=True):
            if sees is None:
                limits = [] if spec.window is not None else named_limits(self.config)
                if limits:
                    raise TargetError(
                        f"{self.name} makes its masks itself, and its config says {', '.join(limits)}: specdec cannot "
                        "see how far its attention reaches, so it is refused rather than decoded wrongly"
                    )
            elif sees not in windows:
                windows[sees] = window_of(sees, self.context_length)
            found.append(spec if sees is None else replace(spec, window=windows[sees]))
        return found

    def _has_shadow(self) -> bool:
        """Whether the model can be run in another dtype, a layer at a time."""
        weights = list(self.model.parameters())
        return all(weight.is_floating_point() and not weight.is_meta for weight in weights)

    @contextmanager
    def _shadow(self, maker: RunnerMaker, near: float) -> Iterator[None]:
        """While inside, the model's own modules run with weights in another dtype, one layer at a time.

        ``near``: of packed weights that round rows to bytes.
        """
        dtype = self._reference.other_dtype
        layers = [maker.module_layer(number, ShadowLayer, dtype=dtype) for number in range(self.num_layers)]
        runner = maker.of_layers("walk", [*layers], [])
        parts = self.model.get_input_embeddings(), maker.norm, self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        runner.embed, runner.norm, runner.head = (Evaluated(part, dtype=dtype) for part in parts)
        if isinstance(parts[0], TiedEmbedding):  # which has no parameters to be cast
            embed = Evaluated(parts[0].in_float32())
            runner.embed = lambda tokens: embed(tokens).to(dtype)
        stores = [store for store in _stores(self.model) if isinstance(store, BlockWeight)]
        for store in stores:
            store.near = near
        try:
            with self._using(runner), runner.every_expert():
                yield
        finally:
            for store in stores:
                store.near = 0.0

    @contextmanager
    def _using(self, runner: LayerRunner) -> Iterator[None]:
        """While inside, this runner runs the layers; afterwards it is not held any more."""
        former, self.runner, self.options["runner"] = self.runner, runner, runner.name
        try:
            yield
        finally:
            self.runner, self.options["runner"] = former, former.name

    def _differs(self, runner: LayerRunner) -> str | None:
        with self._using(runner), runner.every_expert():
            return self._reference.differs() or runner.misroutes()

    def _kept_seconds(self, name: str) -> list[float] | None:
        curve = kept_curve(describe(self, runner=name))
        return None if curve is None else _timed(curve)

    def _seconds(self, progress: Callable[[float], None] | None, runner: LayerRunner) -> list[float] | None:
        with self._using(runner):
            curve = new_curve(self, stored_at(describe(self)), progress)
        return _timed(curve) if curve.steady else None


def _stores(model: nn.Module) -> Iterator[PackedWeight]:
    """The packed weights of a model's modules."""
    return (store for module in model.modules() if isinstance(module, PackedModule) for store in module.stores)


def _sent(output: StepOutput, rows: Rows, last: int) -> StepOutput:
    """The output with what went to the rows' device, and with the last layer's hidden states where they are wanted."""
    if last in rows.step.wanted.hidden:
        output.hidden.setdefault(last, output.out)
    output.sent = rows
    return output


def _state(weight: torch.Tensor) -> tuple[int, tuple[int, ...], int | None]:
    """Where a weight is, how it lies there, and how often it was written to, as far as torch tells."""
    own: Any = getattr(weight, "_local_tensor", weight)  # of a DTensor
    try:
        place = own.data_ptr()
    except RuntimeError:  # a tensor that is made of others has none
        place = id(weight)
    return place, own.stride(), torch_switches.writes_to(own)


def _timed(curve: CostCurve) -> list[float]:
    """Seconds of steps of ``TIMED_ROWS`` rows."""
    seconds = curve.at(0, TIMED_ROWS[-1]).tolist()
    return [seconds[rows] for rows in TIMED_ROWS]


def time_runners(path: str | Path, **options: Any) -> dict[str, dict[str, float] | str]:
    """Runner -> rows -> seconds of whole steps, or the reason why it cannot run the model, as ``auto`` compares them.

    ``options``: those of :meth:`TransformersTarget.from_pretrained` without ``execution``.
    """
    found: dict[str, dict[str, float] | str] = {}
    for name in EXECUTIONS[1:]:
        try:
            target = TransformersTarget.from_pretrained(path, **{**options, "execution": name})
        except (ConfigError, TargetError) as error:
            found[name] = str(error)
            continue
        curve = measure(target, rows=TIMED_ROWS, lengths=(256,), seconds=2.0)
        found[name] = {str(rows): seconds for rows, seconds in zip(curve.rows, curve.seconds[0], strict=True)}
    return found
