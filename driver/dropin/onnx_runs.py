"""The runs of one session: in a device, and in this process where the device cannot.

A session of ONNX Runtime's class belongs to the program, which subclasses it, and gives it attributes. So all that is
ours is in an object of its own, under one name.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import MissedDeadlineTransient, PeerDied, StatusError
from driver.dropin.device_model import DeviceModel, has_killed
from driver.dropin.hook import DEVICE
from driver.dropin.not_on_device import NotOnDevice
from driver.dropin.onnx_sessions import NumpyTypes, bare_session, frozen_source, model_name, model_of
from driver.dropin.ort_options import RecordedOptions, RunOptions, SessionOptions, settings_for
from driver.dropin.ort_values import NUMPY_TYPES, view_of
from driver.dropin.report import tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.devices.onnxruntime.session_settings import SessionSettings

_real: Any = import_module("onnxruntime")
_state: Any = import_module("onnxruntime.capi._pybind_state")
_RealSession: Any = _real.InferenceSession
_REACHED = "the program asked the session for what only its own process can tell"
_NO_NUMBERS = "values are run on, and an input or output of the file is no tensor of numbers"
_TERMINATED = "[ONNXRuntimeError] : 1 : FAIL : Exiting due to terminate flag being set to true."
_DOCTOR = "see `burst doctor`"
_real.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32)).numpy()  # imports what cannot be while Python ends


class SessionArguments(NamedTuple):
    """The arguments of a session, as the program gave them; recorded: what its options were then."""

    source: Any
    options: Any
    providers: Any
    provider_options: Any
    more: dict[str, Any]
    recorded: RecordedOptions | None

    @classmethod
    def of(cls, source: Any, options: Any, providers: Any, provider_options: Any, more: dict[str, Any]) -> Any:
        """Return the arguments of a session, and what is written down of its options."""
        recorded = options.recorded if isinstance(options, SessionOptions) else None
        rest = {"provider_options": provider_options, "more": more, "recorded": recorded}
        return cls(source, options, providers, **rest)

    def options_then(self) -> Any:
        """Return options as they were when the session was made; None if it was given none."""
        return None if self.recorded is None else SessionOptions.of(self.recorded)


class OnnxRuns:
    """All that is ours of a session. names: attributes that are the real class's; own: its session in this process, if
    there is one; bare: one of the graph without weights, where its inputs and outputs are tensors of numbers.
    """

    def __init__(self, arguments: SessionArguments | None = None, names: frozenset[str] = frozenset()) -> None:
        self.names = names
        self.own: Any = None
        self.bare: Any = None
        self.device: DeviceModel | None = None
        self._given = arguments
        self._making = threading.RLock()  # a signal's handler may use the session
        self._name = "?" if arguments is None else model_name(arguments.source)

    @property
    def may_be_made_again(self) -> bool:
        """False for a session that ONNX Runtime made by itself."""
        return self._given is not None

    @property
    def arguments(self) -> SessionArguments:
        """The arguments that the session was made of."""
        if self._given is None:
            raise TypeError("a session that ONNX Runtime made by itself cannot be made again")
        return self._given

    def begin(self, make_bare: Callable[..., Any]) -> None:
        """Prepare the model on the device. Raise NotOnDevice, which is counted, if it is to run in this process.

        `make_bare`: makes the session of a graph and options with the real class.
        """
        given = self.arguments
        tally.count(self._name, "sessions")
        try:
            settings = settings_for(given.options, given.providers, given.more)
            self.device = DeviceModel(model_of(given.source, settings), os.environ.get(DEVICE) or "onnxruntime")
            with _meanwhile(self.device.prepare):  # the device loads the file in another process
                self._make_bare(settings, make_bare)
        except NotOnDevice as error:
            self._stay(str(error), error.remedy)
        except Exception as error:  # whatever it is, the program runs
            if has_killed(error) or isinstance(error, PeerDied):
                raise _died(error) from error
            tally.warn(f"{self._name} runs in this process: {error}")
            self._stay(f"the device did not take it: {error}", _DOCTOR)

    def _stay(self, reason: str, remedy: str = "") -> None:
        self.device = self.own = self.bare = None
        tally.refuse(self._name, reason, remedy)
        raise NotOnDevice(reason, remedy)

    def _make_bare(self, settings: SessionSettings, make: Callable[..., Any]) -> None:
        """Have the real class tell what it knows of the file. Raise NotOnDevice where it makes no session of it."""
        assert self.device is not None
        model = self.device.model
        graph, options, self._zeros = bare_session(model, settings, self.arguments.options)
        try:
            session = make(graph, options)
        except Exception as error:
            raise NotOnDevice(f"ONNX Runtime makes no session of its graph alone: {error}") from error
        self._its_bare, self.own = self.own, None
        self._types = NumpyTypes(
            [*session._inputs_meta, *session._overridable_initializers],
            [tensor.name for tensor in model.inputs if tensor.shape == ()],
        )
        outputs = [each.type in NUMPY_TYPES for each in session._outputs_meta]
        self.bare = self._its_bare if all(outputs) and self._types.is_numeric else None
        self._names = [tensor.name for tensor in model.inputs]
        self._places = {tensor.name: n for n, tensor in reversed([*enumerate(model.outputs)])}
        self._settings = settings

    def reached(self) -> Any:
        """Return the session in this process, which the real class works with: made when it is first asked for."""
        if self.own is None and self.device is not None:
            tally.refuse(self._name, _REACHED)
            self.make_own()
        return self.own

    def make_own(self) -> None:
        """Make the session of this process, if there is none: of the file and the options as they were."""
        with self._making:
            if self.own is None and self.device is not None:
                given = self.arguments
                source, options = frozen_source(self.device.model, self._settings, given.options_then())
                self.own = _RealSession(source, options, given.providers, given.provider_options, **given.more)._sess

    def attempt(self, request: Callable[[], Any], run_options: Any) -> list[Any] | None:
        """Return the outputs of a run in the device; None: this process is to do it, and is ready to.

        `request`: returns the names of outputs and the feed, or raises NotOnDevice.
        """
        device = self.device
        if device is not None:
            try:
                found = self._run_on_device(device, request, run_options)
            except NotOnDevice as error:
                self._refuse(str(error), remedy=error.remedy)
            except MissedDeadlineTransient as error:  # no run of ours has a deadline
                self._refuse(f"a loop in it takes longer than a device waits: {error}", error)
                self.device = None
            except (StatusError, ValueError) as error:
                self._refuse(f"a run failed in the device: {error}", error)
            except _state.Fail:  # the program has ended the run
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, the program runs
                self._refuse(f"the device is gone: {error}", error)
                tally.warn(f"{self._name} runs in this process from now on: {error}")
                self.device = None
            else:
                tally.count(self._name, "device_runs")
                return found
        tally.count(self._name, "process_runs")
        return None

    def _refuse(self, reason: str, error: Exception | None = None, remedy: str = "") -> None:
        """Count why something is done in this process, and be ready for it. Raise for a file that has killed its
        device.
        """
        if error is not None and has_killed(error):
            raise _died(error) from error
        tally.refuse(self._name, reason, remedy)
        self.make_own()

    def _run_on_device(self, device: DeviceModel, request: Callable[[], Any], run_options: Any) -> list[Any]:
        """Return the outputs. Raise NotOnDevice for what the device does not do, and as `DeviceModel.run`."""
        if sys.is_finalizing():
            raise NotOnDevice("this process is ending")
        output_names, feed = request()
        if not isinstance(feed, Mapping):
            raise NotOnDevice("the inputs are no dict")
        if run_options is not None and (obstacle := RunOptions.obstacle_of(run_options)):
            raise NotOnDevice(obstacle)
        if output_names is not None and type(output_names) not in {list, tuple}:
            raise NotOnDevice("the names of outputs are no list")
        if output_names and not all(isinstance(name, str) and name in self._places for name in output_names):
            raise NotOnDevice("an output is asked for that the file does not name")
        watch = None if run_options is None else run_options.watch
        try:
            outputs = device.run(self._types.checked(self._names, feed), watch)
        except CancelledError:
            raise _state.Fail(_TERMINATED) from None
        return [outputs[self._places[name]] for name in output_names] if output_names else list(outputs)

    def views(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays that values are. Raise NotOnDevice."""
        if self.bare is None:
            raise NotOnDevice(_NO_NUMBERS)
        if not (isinstance(values, Mapping) and all(isinstance(value, _real.OrtValue) for value in values.values())):
            raise NotOnDevice("the inputs are no dict of OrtValues")
        return {name: view_of(value) for name, value in values.items()}


def _died(error: Exception) -> Exception:
    """Return ONNX Runtime's own error for a file that has killed its device again."""
    return _state.RuntimeException(f"[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : {error}")  # type: ignore[no-any-return]


@contextmanager
def _meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Do that in a thread, and raise what it raises if the body raises nothing.

    An executor starts no thread any more when the main one has ended: others go on, and make sessions.
    """
    done = Future[None]()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            done.set_exception(error)
        else:
            done.set_result(None)

    thread = threading.Thread(target=run, name="burst exec", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # this process is ending, or has no thread left
        run()
        thread = threading.current_thread()
    try:
        yield
    finally:
        if thread is not threading.current_thread():
            thread.join()
    done.result()
