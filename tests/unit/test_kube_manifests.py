"""What is sent to Kubernetes for a job."""

from __future__ import annotations

import pytest

from recovery.backend import Rejected
from recovery.backends.kube.manifests import (
    JOB_FOLDER,
    Generation,
    generation_name,
    job_of,
    object_name,
    pod_command,
    pod_template,
    token_secret,
)
from recovery.backends.kube.objects import Meta

OWNER = Meta(name="job", uid="u-1")


def template(given: dict[str, object] | None = None, command: tuple[str, ...] = ("run",)) -> dict[str, object]:
    return pod_template(given, job="job", image="image:1", command=command, port=7077)


def test_a_name_that_kubernetes_takes_stays_and_others_are_told_apart() -> None:
    assert object_name("llama-7b") == "llama-7b"
    names = {object_name(name) for name in ("Llama_7B", "llama_7b", "llama.7b", "-", "x" * 48, "x" * 47 + "y")}
    assert len(names) == 6
    for name in names:
        assert len(f"{generation_name(name, 999_999)}-99999-abcde") <= 63
        assert name[0].isalnum()
        assert name[-1].isalnum()
        assert name == name.lower()


def test_a_pod_runs_the_launcher_and_what_the_user_wants_stays() -> None:
    given = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "tolerations": [{"key": "gpu"}],
            "containers": [
                {"name": "sidecar", "image": "s"},
                {"name": "transom", "image": "mine", "resources": {"limits": {"nvidia.com/gpu": 8}}, "args": ["x"]},
            ],
        },
    }
    pod = template(given, ("transom", "launcher"))
    launcher = pod["spec"]["containers"][1]
    assert (launcher["image"], launcher["command"]) == ("mine", ["transom", "launcher"])
    assert launcher["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert "args" not in launcher
    assert pod["spec"]["tolerations"] == [{"key": "gpu"}]
    assert pod["metadata"]["labels"] == {"team": "a"}
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert given["spec"]["containers"][1]["args"] == ["x"], "the user's own is not changed"


def test_the_token_is_a_file_of_its_own_and_stands_in_no_variable() -> None:
    pod = template()
    volume = next(one for one in pod["spec"]["volumes"] if "secret" in one)
    assert volume["secret"] == {"secretName": "job", "defaultMode": 0o400}
    secret = token_secret("job", "s3cret", OWNER)
    assert "s3cret" not in str(pod) + str(secret)


def test_a_state_folder_of_the_users_own_is_taken() -> None:
    given = {
        "spec": {
            "containers": [{"name": "transom", "env": [{"name": "TRANSOM_STATE_DIR", "value": "/shared"}]}],
        }
    }
    pod = template(given)
    assert {"name": "TRANSOM_STATE_DIR", "value": "/shared"} in pod["spec"]["containers"][0]["env"]
    assert not [one for one in pod["spec"]["volumes"] if "emptyDir" in one]
    assert [one for one in template()["spec"]["volumes"] if "emptyDir" in one]


@pytest.mark.parametrize(
    ("given", "image", "told"),
    [
        (None, "", "which image"),
        ({"spec": {"containers": [{"name": "a"}, {"name": "b"}]}}, "i", "which container"),
        ({"spec": []}, "i", "no mapping"),
    ],
)
def test_a_template_that_does_not_say_enough_is_refused(given: object, image: str, told: str) -> None:
    with pytest.raises(Rejected, match=told):
        pod_template(given, job="job", image=image, command=("run",), port=1)


def test_bad_nodes_are_kept_out_of_each_of_the_users_own_terms() -> None:
    zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in ("a", "b")]
    own = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": zones}}
    given = {"spec": {"affinity": {"nodeAffinity": own}, "containers": [{"name": "transom"}]}}
    manifest = job_of("job", Generation(3, 2, 7, "t", ("n1", "n2")), template(given), OWNER, 7077)
    affinity = manifest["spec"]["template"]["spec"]["affinity"]
    terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [term["matchExpressions"][0]["values"] for term in terms] == [["a"], ["b"]]
    for term in terms:
        assert [(one["operator"], one["values"]) for one in term["matchFields"]] == [
            ("NotIn", ["n1"]), ("NotIn", ["n2"]),
        ]  # fmt: skip


def test_a_job_tries_nothing_again_and_one_pod_takes_no_other_with_it() -> None:
    manifest = job_of("job", Generation(3, 4, 7, "t"), template(), OWNER, 7077)
    spec = manifest["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"], spec["podReplacementPolicy"]) == (0, 4, "Failed")
    assert manifest["metadata"]["annotations"]["transom/attempt"] == "7"
    assert manifest["metadata"]["annotations"]["transom/token"] == "t"
    assert manifest["metadata"]["ownerReferences"][0]["uid"] == "u-1"


def test_a_launcher_listens_where_it_is_known_and_reads_its_job_from_the_config_map() -> None:
    command = ["/here/python", "-m", "pipelines", "launcher", "--listen", "auto", "--with-engine"]
    assert pod_command(command, port=7, interpreter="python3") == [
        "python3", "-m", "pipelines", "launcher", "--listen", "$(POD_IP):7", "--with-engine",
        "--registered", JOB_FOLDER,
    ]  # fmt: skip
    assert pod_command(["sleep", "5"], port=7, interpreter="") == ["sleep", "5"]
