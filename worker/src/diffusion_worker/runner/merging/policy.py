# SPDX-License-Identifier: Apache-2.0
"""The model classes of a loaded pipeline whose calls may be merged: by their records, and by verdicts of this worker's own checks."""

import functools
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch

from diffusion_worker.config import VerifyMerging
from diffusion_worker.messages import MergeBasis, MergeVerdict, ModelMerging
from diffusion_worker.runner.families import merged_methods, model_record, signature_of
from diffusion_worker.runner.merging.trust import Trust, trust_in
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.model_call.kinds import kinds_of


class Subject(msgspec.Struct, frozen=True):
    """A method of a component's class, of which calls may be merged or not."""

    component: str
    model_class: Any
    method: str

    def fits(self, verdict: MergeVerdict) -> bool:
        """Return whether a verdict is about this method, with the signature and the source that it has now."""
        told = verdict.component, verdict.model, verdict.method, verdict.signature, verdict.source
        return told == (self.component, self.model_class.__name__, self.method, self.signature, source_of(self.model_class))

    @property
    def signature(self) -> str:
        """The parameters of the method as text."""
        return signature_of(self.model_class, self.method) or ""

    def verdict(self, **fields: Any) -> MergeVerdict:
        """Return a verdict about this method as it is now; `fields` are the verdict's further fields."""
        name, source = self.model_class.__name__, source_of(self.model_class)
        return MergeVerdict(component=self.component, model=name, method=self.method, signature=self.signature, source=source, **fields)


class Merging:
    """The decision about each call of the `modules`. Without a verdict a class with a valid record is merged, and no other.

    `verify` decides about which classes verdicts count.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module], verify: VerifyMerging) -> None:
        self._verify = verify
        self._classes: dict[str, Any] = {name: type(module) for name, module in modules.items()}
        self._trust: dict[tuple[Any, str], Trust] = {}
        self._verdicts: dict[tuple[str, str], MergeVerdict] = {}

    def allows(self, call: ModelCall) -> bool:
        """Return whether rows of other requests may be in this call, and its own be spread over ranks.

        A verdict with a problem forbids it. Otherwise a valid record of the class allows it, or a verdict on calls with arguments of these
        kinds.
        """
        model_class = type(call.module) if call.module is not None else self._classes.get(call.component, type(None))
        trusted = self._trusted(model_class, call.method).ok
        verdict = self._verdicts.get((call.component, call.method))
        if verdict is None:
            return trusted
        return not verdict.problem and (trusted or kinds_of(call) in verdict.arguments)

    def to_verify(self) -> list[Subject]:
        """Return the methods that the options want verified, and about which there is no verdict yet."""
        return [subject for subject in self._subjects() if self._is_open(subject)]

    def has_record(self, subject: Subject) -> bool:
        """Return whether a method's class has a valid record for it; a verdict may still keep its calls apart."""
        return self._trusted(subject.model_class, subject.method).ok

    def adopt(self, verdicts: Sequence[MergeVerdict]) -> None:
        """Follow verdicts from now on.

        A verdict about another class, signature or source than the loaded one is ignored. With `never` all are ignored, and with `auto`
        those about methods for which the model class has a valid record.
        """
        for subject in self._subjects():
            for verdict in verdicts:
                if self._verifies(subject) and subject.fits(verdict):
                    self._verdicts[subject.component, subject.method] = verdict

    def described(self) -> list[ModelMerging]:
        """Return for each method of each component if its calls are merged, and why."""
        return [self._describe(subject) for subject in self._subjects()]

    def _subjects(self) -> list[Subject]:
        return [Subject(name, kind, method) for name, kind in self._classes.items() for method in _methods(kind)]

    def _is_open(self, subject: Subject) -> bool:
        return self._verifies(subject) and (subject.component, subject.method) not in self._verdicts

    def _verifies(self, subject: Subject) -> bool:
        if self._verify is VerifyMerging.AUTO:
            return not self._trusted(subject.model_class, subject.method).ok
        return self._verify is VerifyMerging.ALWAYS

    def _trusted(self, model_class: Any, method: str) -> Trust:
        key = model_class, method
        if key not in self._trust:
            self._trust[key] = trust_in(model_class, method)
        return self._trust[key]

    def _describe(self, subject: Subject) -> ModelMerging:
        trust = self._trusted(subject.model_class, subject.method)
        verdict = self._verdicts.get((subject.component, subject.method))
        basis, why = MergeBasis.RECORD if trust.ok else MergeBasis.ALONE, trust.why
        if verdict is not None:
            agreed = f"merged calls differed by {verdict.apart:.1e} from the same calls alone, at most {verdict.allowed:.1e} is rounding"
            basis = MergeBasis.ALONE if verdict.problem else MergeBasis.VERIFIED
            why = f"{trust.why}; verified: {verdict.problem or agreed}"
        elif not trust.ok:
            why += "; not verified, because of --verify-merging never" if self._verify is VerifyMerging.NEVER else "; not verified yet"
        return ModelMerging(subject.component, subject.model_class.__name__, subject.method, basis, why, self._is_open(subject))


def _methods(model_class: Any) -> Sequence[str]:
    return tuple(model_record(model_class).signatures) or merged_methods(model_class)


@functools.cache
def source_of(model_class: Any) -> str:
    """Return the SHA-256 of the file with a class; empty for a class that is in no file."""
    try:
        return hashlib.sha256(Path(inspect.getfile(model_class)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""


def platform_of(device: torch.device) -> str:
    """Return the libraries that compute, with their versions, and the kind of the device."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "diffusers", "transformers"))
    return f"{libraries}, {torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type}"
