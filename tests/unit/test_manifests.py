"""The files for Kubernetes and SkyPilot: their schemas, the names that must agree, and the commands in them."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from ringmaster_dist.cli.parser import Parser
from ringmaster_dist.cli.worker import run_worker, worker_options
from ringmaster_dist.config.compose import compose, to_typed
from ringmaster_dist.doctor import probe

DOCKER = Path(__file__).parents[2] / "docker"
FOLDER = DOCKER / "kubernetes"
# Of Kubernetes 1.35, for the kinds that are used here, without descriptions. No other property is allowed.
KINDS = json.loads((Path(__file__).parent / "kubernetes.schema.json").read_text())


def only(required=(), **properties):
    """The schema of an object that has these properties and no other."""
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


# Of a CronJob, the properties that are used here. No other is allowed.
KINDS["CronJob"] = only(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"type": "string", "enum": ["batch/v1"]},
    kind={"type": "string", "enum": ["CronJob"]},
    metadata={"$ref": "ObjectMeta"},
    spec=only(
        ["schedule", "jobTemplate"],
        schedule={"type": "string"},
        suspend={"type": "boolean"},
        jobTemplate=only(
            spec=only(["template"], backoffLimit={"type": "integer"}, template={"$ref": "PodTemplateSpec"})
        ),
    ),
)
_TYPES = {"string": str, "boolean": bool, "object": dict, "array": list, "null": type(None), "integer": int,
          "number": (int, float)}  # fmt: skip


def faults(value, schema, where=""):
    """What JSON Schema forbids, for the keywords that occur here."""
    if "$ref" in schema:
        yield from faults(value, KINDS[schema["$ref"]], where)
        return
    if "oneOf" in schema:
        if sum(not list(faults(value, one)) for one in schema["oneOf"]) != 1:
            yield f"{where}: {value!r} is none of {schema['oneOf']}"
        return
    names = schema.get("type", list(_TYPES))
    names = [names] if isinstance(names, str) else names
    is_odd_bool = isinstance(value, bool) and "boolean" not in names
    if is_odd_bool or not isinstance(value, tuple(_TYPES[name] for name in names)):
        yield f"{where}: {value!r} is not of type {names}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is not in {schema['enum']}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from faults(item, schema.get("items", {}), f"{where}[{index}]")
    elif isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        yield from (f"{where} has no {name}" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            if name not in known and others is False:
                yield f"{where}: there is no property {name}"
            else:
                yield from faults(item, known.get(name, others), f"{where}.{name}")


def objects():
    return [found for path in sorted(FOLDER.glob("*.yaml")) for found in yaml.safe_load_all(path.read_text())]


def of_kind(kind):
    return [found for found in objects() if found["kind"] == kind]


(KUSTOMIZATION,), (SERVER,), WORKERS = of_kind("Kustomization"), of_kind("StatefulSet"), of_kind("Deployment")
(REPLAY,) = of_kind("CronJob")
PODS = [found["spec"]["template"] for found in (SERVER, *WORKERS)]
REPLAYING = REPLAY["spec"]["jobTemplate"]["spec"]["template"]


def container(template):
    (one,) = template["spec"]["containers"]
    return one


@pytest.mark.parametrize("given", [found for found in objects() if found["kind"] != "Kustomization"],
                         ids=lambda found: f"{found['kind']}-{found['metadata']['name']}")  # fmt: skip
def test_a_manifest_fits_its_schema(given):
    assert list(faults(given, KINDS[given["kind"]])) == []


def test_the_schema_finds_mistakes():
    wrong = json.loads(json.dumps(SERVER))
    wrong["spec"]["replicas"] = "1"
    container(wrong["spec"]["template"])["livenessprobe"] = {}
    del wrong["spec"]["selector"]
    assert [fault.partition(":")[0] for fault in faults(wrong, KINDS["StatefulSet"])] == [
        ".spec has no selector", ".spec.replicas", ".spec.template.spec.containers[0]",
    ]  # fmt: skip


def test_names_agree():
    """Service and workers' address, port numbers, labels, the secret, and the paths at which volumes are used."""
    (service,) = of_kind("Service")
    name, (port,) = service["metadata"]["name"], service["spec"]["ports"]
    assert SERVER["spec"]["serviceName"] == name
    assert service["spec"]["clusterIP"] == "None"
    assert {"name": port["targetPort"], "containerPort": port["port"]} in container(PODS[0])["ports"]
    for worker in WORKERS:
        assert f"server={name}:{port['port']}" in container(worker["spec"]["template"])["args"]
    for kind in (SERVER, *WORKERS):
        assert kind["spec"]["selector"]["matchLabels"] == kind["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == PODS[0]["metadata"]["labels"]
    for policy in of_kind("NetworkPolicy"):
        chosen = policy["spec"]["podSelector"]["matchLabels"].items()
        assert any(chosen <= pod["metadata"]["labels"].items() for pod in PODS)
        rule = (policy["spec"].get("ingress") or policy["spec"]["egress"])[0]
        assert [each["port"] for each in rule["ports"]] == [port["port"]]
    assert set(KUSTOMIZATION["resources"]) == {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert {container(pod)["image"] for pod in PODS} == {image["name"] for image in KUSTOMIZATION["images"]}
    claims = {claim["metadata"]["name"] for claim in SERVER["spec"]["volumeClaimTemplates"]}
    readme = (FOLDER / "README.md").read_text()
    for pod in PODS:
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container(pod)["volumeMounts"]}
        assert mounts.keys() == volumes.keys() | (claims if pod is PODS[0] else set())
        (variable,) = container(pod)["env"]
        assert variable == {"name": "RINGMASTER_TOKEN_FILE", "value": f"{mounts['token']}/token"}
        assert f"create secret generic {volumes['token']['secret']['secretName']} --from-literal=token=" in readme
    assert not of_kind("Secret")  # nobody trains with a token that is in a repository


def test_pods_have_no_privileges():
    for pod in (*PODS, REPLAYING):
        spec, own = pod["spec"], container(pod)["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert f"--uid {spec['securityContext']['runAsUser']} " in (DOCKER / "Dockerfile").read_text()
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert own == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert spec["automountServiceAccountToken"] is False


def settings(words):
    """The configuration of ``ringmaster_dist train`` with these words."""
    return to_typed(compose(words, "train"), real_time=True)


def read_worker(words):
    parser = Parser("worker", run_worker.__doc__)
    worker_options(parser)
    return parser.read(words, takes_overrides=False)[0]


def test_the_commands_of_the_pods_are_understood():
    """The server gets the time that it needs after SIGTERM, and expects as many workers as there are."""
    module, command, *words = container(PODS[0])["args"]
    assert (module, command) == ("ringmaster_dist", "train")
    config = settings(words)
    assert config.cluster.workers == sum(worker["spec"]["replicas"] for worker in WORKERS)
    assert (config.cluster.local_workers, config.resume) == (0, "auto")
    assert config.run.dir.startswith("/runs/")
    needed = 2 * config.server.farewell_seconds + config.logger.finish_seconds + config.checkpoint.mirror_seconds
    assert PODS[0]["spec"]["terminationGracePeriodSeconds"] > needed + 30  # and for the checkpoint and an evaluation
    for worker in PODS[1:]:
        module, *words = container(worker)["args"]
        assert module == "ringmaster_dist.worker"
        assert read_worker(words).patience_seconds == 600
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        command = container(PODS[0])[name]["exec"]["command"]
        assert command == ["python", "-m", probe.__name__, f"127.0.0.1:{config.server.port}"]


def test_the_replay_reads_the_run_of_the_server():
    """It runs only when somebody makes a job of it, once, and mounts the server's volume where the server does."""
    assert REPLAY["spec"]["suspend"]
    assert (REPLAY["spec"]["jobTemplate"]["spec"]["backoffLimit"], REPLAYING["spec"]["restartPolicy"]) == (0, "Never")
    one, server = container(REPLAYING), container(PODS[0])
    (run_dir,) = (word.removeprefix("run.dir=") for word in server["args"] if word.startswith("run.dir="))
    assert one["args"] == ["ringmaster_dist", "replay", run_dir]
    assert one["image"] == server["image"]
    (claim,) = SERVER["spec"]["volumeClaimTemplates"]
    name, owner = claim["metadata"]["name"], SERVER["metadata"]["name"]
    (volume,) = (volume for volume in REPLAYING["spec"]["volumes"] if "persistentVolumeClaim" in volume)
    assert volume["persistentVolumeClaim"]["claimName"] == f"{name}-{owner}-0"
    paths = {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
    assert paths.keys() == {volume["name"] for volume in REPLAYING["spec"]["volumes"]}
    assert {"name": name, "mountPath": paths[volume["name"]]} in server["volumeMounts"]
    readme = (FOLDER / "README.md").read_text()
    assert f"--from=cronjob/{REPLAY['metadata']['name']}" in readme
    assert REPLAYING["metadata"]["labels"] not in [pod["metadata"]["labels"] for pod in PODS]


# The properties of SkyPilot 0.14 that are used here. No other is allowed.
_TEXT = {"type": "string"}
_TEXTS = {"type": "object", "additionalProperties": {"type": ["string", "null"]}}
SKY = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": _TEXT,
        "num_nodes": {"type": "integer"},
        "workdir": _TEXT,
        "setup": _TEXT,
        "run": _TEXT,
        "envs": _TEXTS,
        "secrets": _TEXTS,
        "resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"accelerators": _TEXT, "ports": {"type": "integer"}, "disk_size": {"type": "integer"}},
        },
    },
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"SKYPILOT_NODE_RANK": "0"}, "train"),
        ({"SKYPILOT_NODE_RANK": "0", "MIRROR": "s3://bucket/run"}, "train"),
        ({"SKYPILOT_NODE_RANK": "1"}, "server=10.0.0.1:29400"),
        ({"SKYPILOT_NODE_RANK": "0", "SERVER": "192.0.2.1:29400"}, "server=192.0.2.1:29400"),
        ({"SKYPILOT_NODE_RANK": "1", "WORKER_ARGS": "target=my_problem:factory"}, "target=my_problem:factory"),
    ],
)
def test_skypilot_starts_a_server_and_workers(given, expected, tmp_path):
    """The script runs with a command that only notes how it is called."""
    task = yaml.safe_load((DOCKER / "sky.yaml").read_text())
    assert list(faults(task, SKY)) == []
    assert task["secrets"] == {"RINGMASTER_TOKEN": None}
    folder = tmp_path / "ringmaster/bin"
    folder.mkdir(parents=True)
    (folder / "ringmaster").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "ringmaster").chmod(0o755)
    of_sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "4", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    environment = {**os.environ, **of_sky, **task["envs"], **given, "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-euc", task["run"]], env=environment, capture_output=True, text=True, check=True)
    command, *words = done.stdout.splitlines()
    if expected == "train":
        config = settings(words)
        assert (command, config.cluster.workers, config.cluster.local_workers) == ("train", 8, 4)
        assert config.server.port == task["resources"]["ports"]
        assert config.checkpoint.mirror == given.get("MIRROR")
    else:
        assert command == "worker"
        assert expected in words
        assert read_worker(words).workers == 4
