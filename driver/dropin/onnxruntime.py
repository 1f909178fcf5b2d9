"""ONNX Runtime's Python API with the model in a device: `import driver.dropin.onnxruntime as onnxruntime`.

All names are the real module's. `InferenceSession` is a subclass of the real one, which makes it in this process as it
always does, but of a file whose weights are zeros that nothing touches: so inputs, outputs, metadata, providers and
errors of a damaged file are its own. `run` goes to a device. Whatever else is asked for, and whatever the device cannot
do, is done by the real session, which is made when it is first needed.
"""

from __future__ import annotations

import os
import re
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

from driver.dropin.not_on_device import NotOnDevice
from driver.dropin.onnx_runs import OnnxRuns, SessionArguments
from driver.dropin.ort_options import RunOptions, SessionOptions
from driver.dropin.ort_values import BindableSession, IOBinding, value_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

_real: Any = import_module("onnxruntime")
_state: Any = import_module("onnxruntime.capi._pybind_state")
_collection: Any = import_module("onnxruntime.capi.onnxruntime_inference_collection")
_RealSession: Any = _real.InferenceSession
_PREFIX = re.compile(r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")  # of an exception's words, and of no callback's


class InferenceSession(BindableSession, _RealSession):  # type: ignore[misc]
    """A session in a device. See `onnxruntime.InferenceSession`."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Return one that has nothing yet: the real package also makes sessions without `__init__`."""
        session = super().__new__(cls)
        session._burst_exec = OnnxRuns()
        return session

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        **kwargs: Any,
    ) -> None:
        """Make it as the real one. What the device does not take is a session in this process."""
        before = self.__dict__.keys() - self._burst_exec.names - {"_burst_exec"}
        given = SessionArguments.of(
            path_or_bytes, sess_options, providers, provider_options=provider_options, more=kwargs
        )
        self._burst_exec = runs = OnnxRuns(given)

        def bare(graph: bytes, options: Any) -> Any:
            make = super(InferenceSession, self).__init__
            make(graph, options, providers, provider_options, **{**kwargs, "enable_fallback": 0})
            return self

        try:
            runs.begin(bare)
        except NotOnDevice:
            super().__init__(path_or_bytes, sess_options, providers, provider_options, **kwargs)
        else:
            is_path = not isinstance(path_or_bytes, bytes)
            self._enable_fallback = int(kwargs.get("enable_fallback", 1)) == 1
            self._model_path: Any = os.fspath(path_or_bytes) if is_path else None
            self._model_bytes: Any = None if is_path else path_or_bytes
            self._sess_options = given.options_then() or SessionOptions()
            self._sess_options_initial = sess_options
        runs.names = frozenset(self.__dict__.keys() - before)

    @property
    def _sess(self) -> Any:
        """The session in this process, which the real class works with: made when it is first asked for."""
        return self._burst_exec.reached()

    @_sess.setter
    def _sess(self, session: Any) -> None:
        self._burst_exec.own = session

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None) -> Any:
        """Compute the predictions, as the real one: in the device, or else in this process."""
        found = self._burst_exec.attempt(lambda: (output_names, input_feed), run_options)
        return super().run(output_names, input_feed, run_options) if found is None else found

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, Any], run_options: Any = None
    ) -> Any:
        """Compute the predictions, from values to values."""
        runs = self._burst_exec
        found = runs.attempt(lambda: (output_names, runs.views(input_dict_ort_values)), run_options)
        if found is None:
            return super().run_with_ort_values(output_names, input_dict_ort_values, run_options)
        return [value_of(array) for array in found]

    def io_binding(self) -> Any:
        """Return a binding of this session."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        """Compute the predictions, from and to what is bound."""
        if not isinstance(iobinding, IOBinding) or iobinding.owner is None:
            super().run_with_iobinding(iobinding, run_options)
            return
        if iobinding.owner is not self:
            raise ValueError("IOBinding must be used with the session that created it.")
        found = self._burst_exec.attempt(lambda: (iobinding.names, iobinding.feeds()), run_options)
        if found is None or not iobinding.settle(found):
            self._burst_exec.make_own()
            other = iobinding.again(self)
            super().run_with_iobinding(other, run_options)
            iobinding.take(other)

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[Any, Any, str], Any],
        user_data: Any,
        run_options: Any = None,
    ) -> None:
        """Compute the predictions in the background, and call back with them."""
        is_usual = callable(callback) and (not output_names or _are_names(output_names))
        if self._burst_exec.device is None or not is_usual:
            super().run_async(output_names, input_feed, callback, user_data, run_options)
            return
        self._validate_input(list(input_feed.keys()))

        def work() -> None:
            try:
                found, fault = InferenceSession.run(self, output_names, input_feed, run_options), ""
            except Exception as error:  # noqa: BLE001 - told to the callback, as ONNX Runtime does
                found, fault = [], _PREFIX.sub("", str(error), count=1)
            callback(found, user_data, fault)

        threading.Thread(target=work, name="onnxruntime run_async").start()

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """Make the session again, with these providers."""
        if not self._burst_exec.may_be_made_again:
            super().set_providers(providers, provider_options)
            return
        runs, options, falls_back = self._burst_exec, self._sess_options_initial, self._enable_fallback
        source, more = runs.arguments.source, {**runs.arguments.more, "enable_fallback": 0}
        more.pop("disabled_optimizers", None)
        InferenceSession.__init__(self, source, options, providers, provider_options=provider_options, **more)
        self._enable_fallback = falls_back

    def __getstate__(self) -> Any:
        """Return what it was made of, and the attributes of a subclass: the unpickled one is made anew."""
        runs, given = self._burst_exec, self._burst_exec.arguments
        if given.options is not None and given.recorded is None:
            raise TypeError("a session cannot be pickled with options of another class than onnxruntime.SessionOptions")
        theirs = {name: value for name, value in self.__dict__.items() if name not in runs.names}
        return given._replace(options=None), theirs

    def __setstate__(self, state: Any) -> None:
        given, theirs = state
        source, _, providers, provider_options, more, _ = given
        options = given.options_then()
        InferenceSession.__init__(self, source, options, providers, provider_options=provider_options, **more)
        self.__dict__.update(theirs)


def _are_names(names: Any) -> bool:
    """Return True for names that ONNX Runtime takes."""
    return not isinstance(names, str) and all(isinstance(name, str) for name in names)


_OURS: dict[str, Any] = {each.__name__: each for each in (InferenceSession, IOBinding, SessionOptions, RunOptions)}


def replace(module: ModuleType) -> None:
    """Put our classes in the place of the real ones, wherever the real package keeps them."""
    for place in (module, _collection, _state):
        for name, its in _OURS.items():
            if name in vars(place) and not (place is _state and name == "InferenceSession"):
                setattr(place, name, its)


def __getattr__(name: str) -> Any:
    return getattr(_real, name)


def __dir__() -> list[str]:
    return sorted({*dir(_real), *_OURS})
