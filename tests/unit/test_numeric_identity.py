"""Workers whose kernels give other bits: refused by name, or let in where the config says so, and shown."""

from dataclasses import replace

from rule import Edit, holds, rule
from shoal_controller.core.machine.effects import Note, Send
from shoal_controller.core.machine.events import Connected
from shoal_controller.core.machine.machine import new_job, step, view
from shoal_controller.core.machine.spec import JobSpec
from shoal_protos.description import Description
from shoal_protos.messages import PROTOCOL_VERSION, Hello, MemberState, Refusal, Status, Welcome

NUMERICS = {"torch": "2.13.0", "threads": "1", "cpu_capability": "AVX512"}
MADE_OF = Description(4, 8, 4096, 8, 1, 0, 100, (), "SGD", {}, NUMERICS, False, False)
WARMING_UP = Status(sequence=0, generation=0, state=MemberState.WARMING_UP, promised=0, step=-1, committed_in=0)


def hellos(*descriptions: Description):
    """One job hears a hello of each; the answers, the notes, the view."""
    job, messages, notes = new_job(JobSpec("job", 2), 0.0), [], []
    for number, made_of in enumerate(descriptions):
        worker = f"w{number}"
        hello = Hello(
            PROTOCOL_VERSION, "job", worker, f"process{number}", "127.0.0.1:9", "host", 1, "", made_of, WARMING_UP
        )
        job, effects = step(job, [Connected(number, hello)], 0.0)
        messages += [effect.message for effect in effects if isinstance(effect, Send)]
        notes += [(effect.kind, effect.message) for effect in effects if isinstance(effect, Note)]
    return messages, notes, view(job, 0.0)


@rule(
    "A worker with another numeric identity is refused, and the difference is named; with `mixed_numerics` it "
    "may join, and the job is shown as not bit-exact",
    "Arithmetic and layout",
    broken_by=Edit(
        "shoal_protos.description", "(None if jobs.mixed_numerics else numerics_differ(worker, theirs, jobs))", "None"
    ),
)
def test_a_worker_with_another_numeric_identity_is_refused_by_its_name():
    for name, value in NUMERICS.items():
        other = replace(MADE_OF, numerics={**NUMERICS, name: "another"})
        messages, _, shown = hellos(MADE_OF, other)
        assert isinstance(messages[0], Welcome) and isinstance(messages[1], Refusal)
        assert messages[1].sentence == (
            f"worker w1 joined with another numeric identity: {name} is another, the job's is {value}. "
            "Start it with the job's script and config."
        )
        assert "bit-exact" not in shown.reason


def test_of_all_that_differs_the_device_is_named():
    another = dict.fromkeys(NUMERICS, "another") | {"device": "cpu"}
    job = {**NUMERICS, "device": "NVIDIA H100, CUDA 13.0, cuDNN 91002"}
    messages, _, _ = hellos(replace(MADE_OF, numerics=job), replace(MADE_OF, numerics=another))
    assert messages[1].sentence == (
        "worker w1 joined with another numeric identity: device is cpu, the job's is NVIDIA H100, CUDA 13.0, cuDNN "
        "91002. Start it with the job's script and config."
    )


def test_a_variable_that_only_one_of_them_has_is_a_difference():
    messages, _, _ = hellos(MADE_OF, replace(MADE_OF, numerics={**NUMERICS, "MKL_CBWR": "AVX2"}))
    assert "MKL_CBWR is AVX2, the job's is not set" in messages[1].sentence


@holds("A worker with another numeric")
def test_with_mixed_numerics_it_may_take_part_and_the_job_is_shown_as_not_bit_exact():
    mixed = replace(MADE_OF, mixed_numerics=True)
    messages, notes, shown = hellos(mixed, mixed, replace(mixed, numerics={**NUMERICS, "threads": "2"}))
    assert [type(message) for message in messages] == [Welcome] * 3
    assert [message for kind, message in notes if kind == "not_bit_exact"] == [
        "worker w2 joined with another numeric identity: threads is 2, the job's is 1. "
        "mixed_numerics is true: the run is not bit-exact."
    ]
    assert shown.reason.endswith("; not bit-exact: mixed_numerics is true")
