"""How a server is started that captures hidden states instead of answering, and whether the installed SGLang can."""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rebuild.errors import StepError
from rebuild.serving.devices import Device
from rebuild.serving.flags import CPU_FLAGS, Flags, Purpose, limited
from rebuild.states.captured import Wanted
from rebuild.step import say

PREFIX = "capture-"  # of the ids of requests whose states the hook writes
MODULES = Path(__file__).resolve().parents[2]  # the folder that holds this package
HOOK = "rebuild.capture.engine_hook:make_hook"
HEAD_MODULES = ["logits_processor", "*.logits_processor"]
NORM_MODULES = ["model.norm", "*.model.norm", "language_model.norm"]
# Tokens of a prefill: enough to fill a GPU. A CPU gains nothing by more than fit into its caches.
BATCH_TOKENS = {"gpu": 8192, "cpu": 2048}
# SGLang refuses a request that leaves fewer than 6 tokens of the context or of the KV cache, and rounds lengths up to
# pages, of 256 tokens at most.
SPARE_CONTEXT = 16
PAGE = 256
NEEDED = (
    "forward-hooks",
    "disable-radix-cache",
    "chunked-prefill-size",
    "max-prefill-tokens",
    "skip-tokenizer-init",
    "disable-overlap-schedule",
)
AUXILIARY = ("enable-return-aux-hidden-states", "return-aux-hidden-state-layer-ids")
WITHOUT_GRAPHS = ("disable-prefill-cuda-graph", "disable-decode-cuda-graph", "disable-cuda-graph")
# The ways in which SGLang's models take ids of layers, and the method by which one shows that it knows the way. The
# first is preferred: with it, id k is the output of layer k for every model; with the second for most.
METHODS = {
    "DFLASH": "set_dflash_layers_to_capture",
    "EAGLE3": "set_eagle3_layers_to_capture",
}
# The user's flags that a capturing server does without: beginning of the flag -> why.
DROPPED = {
    "speculative-": "every token is prefilled, none is drafted",
    "enable-hierarchical-cache": "cached tokens have no states",
    "enable-hicache": "cached tokens have no states",
    "hicache-": "cached tokens have no states",
    "enable-lmcache": "cached tokens have no states",
    "lmcache-": "cached tokens have no states",
    "radix-": "cached tokens have no states",
    "enable-session-radix-cache": "cached tokens have no states",
    "enable-mixed-chunk": "a sample is prefilled in one piece",
    "enable-dynamic-chunking": "a sample is prefilled in one piece",
    "cuda-graph-": "hooks run only outside CUDA graphs",
    "enable-torch-compile": "hooks run only outside compiled graphs",
    "torch-compile-": "hooks run only outside compiled graphs",
    "enable-two-batch-overlap": "hooks see batches whole",
    "enable-dp-attention": "states must be whole on the first device",
    "attn-dp-size": "states must be whole on the first device",
    "disaggregation-": "prefill is all that this server does",
    "max-queued-requests": "requests wait for the consumer of the states",
    "reasoning-parser": "nothing is answered",
    "tool-call-parser": "nothing is answered",
    "default-chat-template-kwargs": "nothing is answered",
    "enable-tokenizer-batch-encode": "nothing is tokenized",
    "enable-dynamic-batch-tokenizer": "nothing is tokenized",
}


@dataclass(frozen=True)
class Layers:
    """How the wanted layers are had: those that the engine captures itself, and whether the last one is among them.

    Models capture a layer's output as the next one's input, so the last layer's is taken from the final norm.
    """

    taps: tuple[int, ...]
    last: bool

    @classmethod
    def of(cls, wanted: Wanted, count: int) -> "Layers":
        """Return it for a model of `count` layers.

        Raises:
            StepError: ids that are not layers of the model, or not ascending.
        """
        inside = all(0 <= layer < count for layer in wanted.layers)
        if not inside or list(wanted.layers) != sorted(set(wanted.layers)):
            raise StepError(
                "layers that the model does not have, or in no order",
                expected=f"ids from 0 to {count - 1}, ascending, each once",
                seen=str(list(wanted.layers)),
                remedy="correct hidden_states.layers",
            )
        taps = tuple(layer for layer in wanted.layers if layer < count - 1)
        return cls(taps, last=len(taps) < len(wanted.layers))


def keep_flags(flags: Flags) -> Flags:
    """Return the user's flags without those that a capturing server does without; these are logged with the reason."""
    kept: Flags = {}
    reasons: dict[str, list[str]] = {}
    for flag, value in flags.items():
        why = next((DROPPED[begin] for begin in DROPPED if flag.startswith(begin)), None)
        if why is None:
            kept[flag] = value
        else:
            reasons.setdefault(why, []).append(flag)
    for why, dropped in reasons.items():
        say(f"capturing without {', '.join(dropped)} of `server.flags`: {why}")
    return kept


def capture_purpose(
    flags: Flags,
    *,
    model: Mapping[str, Any],
    devices: Sequence[Device],
    wanted: Wanted,
    method: str | None,
    installed: Mapping[str, Any],
    folder: Path,
    longest: int,
) -> Purpose:
    """Return what a server needs to capture: flags that go before the user's `flags`, and the hook's folder of modules.

    `method` is one of METHODS, or None when the engine need not capture layers itself. A prefill takes samples until it
    has `batch` tokens; the last of them must not be cut, so a chunk has room for one more of the longest.
    """
    layers = Layers.of(wanted, model["num_hidden_layers"])
    batch = batch_tokens(flags, devices)
    chunk = batch + longest + PAGE
    given: Flags = {
        "disable-radix-cache": True,
        "disable-overlap-schedule": True,  # it answers a batch only after the next one's states are copied
        "skip-tokenizer-init": True,
        "max-prefill-tokens": batch,
        "chunked-prefill-size": chunk,
        "forward-hooks": json.dumps(hook_specs(wanted, layers, folder)),
    }
    given |= {flag: True for flag in WITHOUT_GRAPHS if flag in installed}
    if layers.taps:
        given |= {
            "enable-return-aux-hidden-states": True,
            "speculative-algorithm": method,
            "return-aux-hidden-state-layer-ids": list(layers.taps),
        }
    given |= room_for(flags, model, devices, longest, chunk)
    changed = [flag for flag in given if flag in flags and flags[flag] != given[flag]]
    if changed:
        say(f"capturing with other values of `server.flags` than given: {', '.join(changed)}")
    return Purpose(
        given,
        modules=MODULES,
        # SGLang keeps 6 tokens of the context free; a sample that fills it all has none left
        variables={"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
    )


def batch_tokens(flags: Flags, devices: Sequence[Device]) -> int:
    """Return after how many tokens a prefill takes no further sample: the user's max-prefill-tokens, or ours."""
    given = flags.get("max-prefill-tokens")
    return given if type(given) is int and given > 0 else BATCH_TOKENS[devices[0].kind]


def room_for(
    flags: Flags, model: Mapping[str, Any], devices: Sequence[Device], longest: int, chunk: int
) -> Flags:
    """Return the limits that must be raised so that the longest sample, and a whole prefill, have room."""
    raised: Flags = {}
    context = flags.get("context-length") or model["context_length"]
    if context < longest + SPARE_CONTEXT:
        raised["context-length"] = longest + SPARE_CONTEXT
    tokens = flags.get("max-total-tokens")
    if devices[0].kind == "cpu":
        tokens = limited(tokens, CPU_FLAGS["max-total-tokens"])
    if tokens is not None and tokens < chunk + SPARE_CONTEXT:
        raised["max-total-tokens"] = chunk + SPARE_CONTEXT
    return raised


def hook_specs(wanted: Wanted, layers: Layers, folder: Path) -> list[dict[str, Any]]:
    """Return SGLang's description of the hook that writes states to `folder`."""
    before_norm = wanted.pre_norm or layers.last
    config = {
        "folder": str(folder.resolve()),
        "prefix": PREFIX,
        "taps": len(layers.taps),
        "pre_norm": before_norm,
        "post_norm": wanted.post_norm,
    }
    modules = HEAD_MODULES + (NORM_MODULES if before_norm else [])
    return [{"name": "states", "target_modules": modules, "hook_factory": HOOK, "config": config}]


def capture_method(
    architecture: str, layers: Layers, installed: Mapping[str, Any], package: Path
) -> str | None:
    """Return by which of METHODS the SGLang in the folder `package` captures layers of this architecture.

    None when no layer but the last is wanted.

    Raises:
        StepError: the installed SGLang lacks the flags, or its model the methods.
    """
    needed = NEEDED + (AUXILIARY if layers.taps else ())
    missing = [flag for flag in needed if flag not in installed]
    if missing:
        raise cannot_capture(f"no {', '.join(f'--{flag}' for flag in missing)}")
    if not layers.taps:
        return None
    known = model_methods(architecture, package / "srt" / "models")
    for method, setter in METHODS.items():
        if setter in known:
            return method
    raise cannot_capture(f"its model {architecture} has none of {', '.join(METHODS.values())}")


def cannot_capture(seen: str) -> StepError:
    """Return the error for an installed SGLang that cannot do it."""
    return StepError(
        "the installed SGLang cannot capture hidden states of this model",
        expected="an SGLang that hands over auxiliary hidden states, as 0.5.23 does",
        seen=seen,
        remedy="install what envs/gpu lists, or set hidden_states.backend: transformers",
    )


def model_methods(architecture: str, folder: Path) -> set[str]:
    """Return the names of all methods of a class of SGLang's models and its bases, read from the source files.

    Importing them would take a minute, and a GPU in places. Where several files have a class of one name, such as a
    model and its inner stack, their methods are taken together.
    """
    found: set[str] = set()
    asked: set[str] = set()
    names = [architecture]
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    while names:
        name = names.pop()
        if name in asked:
            continue
        asked.add(name)
        for node in classes_of(name, sources):
            found |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            names += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return found


def classes_of(name: str, sources: Sequence[str]) -> Iterator[ast.ClassDef]:
    """Yield the definitions of the classes of one name."""
    for source in sources:
        if f"class {name}(" not in source:
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield node
