"""What the files for Docker, compose, Kubernetes and systemd say is true of the server, and of each other."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.server.parrot import parrot, wait_until

from everystop.cli import make_parser, settings
from everystop.config import Config
from everystop.core.errors import ConfigError

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "everystop.service"


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def docker_lines() -> list[tuple[str, str]]:
    """Instruction and the rest, of the Dockerfile without comments and with its long lines joined."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    lines = re.sub(r"\\\n", "", kept).splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def docker(instruction: str) -> str:
    """What the last such instruction says."""
    return [rest for name, rest in docker_lines() if name == instruction][-1]


def docker_environment() -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(docker("ENV")))


def health_check() -> list[str]:
    words: list[str] = json.loads(docker("HEALTHCHECK").partition("CMD ")[2])
    return words


def unit() -> dict[str, list[str]]:
    """The settings of all sections; one that is repeated keeps all its values."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        key, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = read_yaml("kustomize/deployment.yaml")["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (one,) = pod()["containers"]
    assert isinstance(one, dict)
    return one


def compose(service: str) -> dict[str, Any]:
    one: dict[str, Any] = read_yaml("compose/compose.yaml")["services"][service]
    return one


def config_map() -> dict[str, str]:
    (generated,) = read_yaml("kustomize/kustomization.yaml")["configMapGenerator"]
    return dict(line.split("=", 1) for line in generated["literals"])


def config_of(words: list[str], environment: dict[str, str]) -> Config:
    """The configuration of a command line, as the command itself makes it."""
    return settings.make_config(make_parser().parse_args(words), environment)


def unit_environment() -> dict[str, str]:
    places = {"%C": "/var/cache", "%S": "/var/lib"}
    text = re.sub("%[CS]", lambda found: places[found[0]], " ".join(unit()["Environment"]))
    return dict(word.split("=", 1) for word in shlex.split(text))


def served() -> dict[str, Config]:
    """The configuration of each deployment, by its name; raises where a flag, variable or value is none of ours."""
    image = docker_environment()
    assert docker("ENTRYPOINT") == '["everystop"]'
    words: list[str] = json.loads(docker("CMD"))
    (start,) = unit()["ExecStart"]
    program, *unit_words = shlex.split(start)
    assert Path(program).name == "everystop"
    return {
        "docker": config_of(words, image),
        "compose": config_of(words, image | compose("everystop")["environment"]),
        "kustomize": config_of(words, image | config_map()),
        "systemd": config_of(unit_words, unit_environment()),
    }


def test_every_flag_variable_and_value_is_one_that_the_server_takes() -> None:
    assert set(served()) == {"docker", "compose", "kustomize", "systemd"}
    known = {f"EVERYSTOP_{field.name.upper()}" for field in settings.all_fields()} | set(settings.OTHER_VARIABLES)
    known |= {"EVERYSTOP_SERVICE_HOST", "EVERYSTOP_SERVICE_PORT"}
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        assert set(re.findall(r"\bEVERYSTOP_[A-Z_]+\b", path.read_text(encoding="utf-8"))) <= known, path


def test_what_the_image_runs_while_it_is_built_is_a_command() -> None:
    pulls = [rest for name, rest in docker_lines() if name == "RUN" and "everystop pull" in rest]
    (model,) = re.findall(r"everystop (pull .*?);", pulls[0])
    default = next(rest for name, rest in docker_lines() if name == "ARG").partition("=")[2]
    assert make_parser().parse_args(shlex.split(model.replace("$MODEL", default))).model == Config().model


def test_a_service_of_our_name_does_not_stop_the_pods() -> None:
    """Kubernetes sets variables for each Service, which for one called everystop begin like ours."""
    links = {
        "EVERYSTOP_SERVICE_HOST": "10.0.0.9",
        "EVERYSTOP_SERVICE_PORT": "8000",
        "EVERYSTOP_PORT": "tcp://10.0.0.9:8000",
    }
    assert read_yaml("kustomize/service.yaml")["metadata"]["name"] == "everystop"
    assert pod()["enableServiceLinks"] is False
    with pytest.raises(ConfigError, match="enableServiceLinks: false"):
        config_of(["serve"], links)


def test_probes_ask_paths_that_need_no_key_and_ports_that_are_named() -> None:
    probes = {name: container()[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/health/ready",
        "readinessProbe": "/health/ready",
        "livenessProbe": "/health/live",
    }
    (port,) = container()["ports"]
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    (asked,) = re.findall(r"/health[/\w]*", health_check()[-1])
    with parrot(api_keys=("sk-1",)) as server:
        for path in {asked, *(probe["path"] for probe in probes.values())}:
            assert server.get(path)[0] == 200
        assert server.get(scrape()["metrics_path"], {"authorization": "Bearer sk-1"})[0] == 200


def test_the_health_check_of_the_image_says_how_the_server_stands() -> None:
    python, *words = health_check()
    assert python == "python"
    with parrot(hold_loading=True) as server:
        environment = {"EVERYSTOP_PORT": str(server.port)}
        check = functools.partial(subprocess.run, [sys.executable, *words], env=environment, capture_output=True)
        assert check().returncode != 0, "it is loading"
        server.load_gate.set()
        wait_until(lambda: server.get("/health")[0] == 200)
        assert check().returncode == 0


def test_ports_agree() -> None:
    port = Config().port
    assert {config.port for config in served().values()} == {port}
    assert int(docker("EXPOSE")) == port
    assert {each["containerPort"] for each in container()["ports"]} == {port}
    (service,) = read_yaml("kustomize/service.yaml")["spec"]["ports"]
    assert service["targetPort"] in {each["name"] for each in container()["ports"]}
    assert service["port"] == port
    annotations = read_yaml("kustomize/deployment.yaml")["spec"]["template"]["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) == port
    assert compose("everystop")["ports"] == [f"127.0.0.1:{port}:{port}"]


def scrape() -> dict[str, Any]:
    (job,) = read_yaml("prometheus/prometheus.yml")["scrape_configs"]
    assert isinstance(job, dict)
    return job


def test_there_is_one_configuration_of_prometheus_which_compose_mounts_with_its_rules() -> None:
    found = {str(path.relative_to(DEPLOY)) for path in DEPLOY.rglob("prometheus.y*ml")}
    assert found == {"prometheus/prometheus.yml", "grafana/provisioning/datasources/prometheus.yml"}
    mounts = dict(volume.split(":")[:2] for volume in compose("prometheus")["volumes"] if volume.startswith("."))
    assert "/etc/prometheus/prometheus.yml" in mounts.values()
    for rules in read_yaml("prometheus/prometheus.yml")["rule_files"]:
        assert mounts[f"../prometheus/{rules}"] == f"/etc/prometheus/{rules}"
    (target,) = (target for each in scrape()["static_configs"] for target in each["targets"])
    assert target == f"everystop:{Config().port}", "the name of the service in compose"


def test_everything_that_compose_mounts_or_builds_from_is_there() -> None:
    folder = DEPLOY / "compose"
    build = compose("everystop")["build"]
    assert (folder / build["context"] / build["dockerfile"]).is_file()
    for service in read_yaml("compose/compose.yaml")["services"]:
        for volume in compose(service)["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (folder / source).exists(), volume
            else:
                assert source in read_yaml("compose/compose.yaml")["volumes"]


def test_what_is_published_on_one_machine_is_kept_from_pages_of_others() -> None:
    config = served()["compose"]
    assert config.host == "0.0.0.0"
    assert config.allowed_host == ("localhost",)


def test_nobody_is_root_and_only_cache_and_tmp_can_be_written() -> None:
    user = docker("USER")
    uid = int(user.partition(":")[0])
    assert uid > 0
    assert f"--uid {uid} " in next(rest for name, rest in docker_lines() if "useradd" in rest)
    home = docker_environment()["EVERYSTOP_HOME"]
    assert docker("VOLUME") == home
    guard = pod()["securityContext"]
    assert guard["runAsNonRoot"] is True
    assert {guard[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {uid}
    for one in (container(), *pod()["initContainers"]):
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {mount["name"] for mount in one["volumeMounts"]} <= {volume["name"] for volume in pod()["volumes"]}
    assert {mount["mountPath"] for mount in container()["volumeMounts"]} == {home, "/tmp"}
    server = compose("everystop")
    assert (server["read_only"], server["cap_drop"], server["tmpfs"]) == (True, ["ALL"], ["/tmp"])
    assert [volume.split(":")[1] for volume in server["volumes"]] == [home]


def test_the_unit_writes_where_systemd_lets_it() -> None:
    said = unit()
    assert said["DynamicUser"] == said["NoNewPrivileges"] == ["yes"]
    assert said["ProtectSystem"] == ["strict"]
    folders = {f"/var/cache/{said['CacheDirectory'][0]}", f"/var/lib/{said['StateDirectory'][0]}"}
    environment = unit_environment()
    assert environment["EVERYSTOP_HOME"] in folders
    assert str(Path(environment["EVERYSTOP_CRASH_DIR"]).parent) in folders


def test_a_drain_has_the_time_that_it_takes() -> None:
    spare_s = 10
    configs = served()
    wait_s = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] >= wait_s + configs["kustomize"].shutdown_timeout + spare_s
    assert int(unit()["TimeoutStopSec"][0]) >= configs["systemd"].shutdown_timeout + spare_s
    assert int(compose("everystop")["stop_grace_period"].rstrip("s")) >= configs["compose"].shutdown_timeout + spare_s
    (told,) = re.findall(r"--stop-timeout (\d+)", (DEPLOY / "README.md").read_text(encoding="utf-8"))
    assert int(told) >= configs["docker"].shutdown_timeout + spare_s


def test_nobody_is_restarted_before_the_server_itself_has_noticed() -> None:
    assert int(unit()["WatchdogSec"][0]) > served()["systemd"].stall_timeout
    probe = container()["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 20


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """By systemd's own tool, where it is installed; the program is replaced by one that exists."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(encoding="utf-8")))
    result = subprocess.run([analyze, "verify", "--man=no", copy], capture_output=True, text=True, check=False)
    about_it = [line for line in (result.stdout + result.stderr).splitlines() if UNIT.name in line]
    assert (result.returncode, about_it) == (0, [])


def test_kustomize_makes_what_selects_its_own_pods() -> None:
    """By kubectl's own kustomize, where it is installed."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    command = [kubectl, "kustomize", str(DEPLOY / "kustomize")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    made = {each["kind"]: each for each in yaml.safe_load_all(told)}
    assert set(made) == {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service"}
    labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [made[kind]["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")]
    assert all(selector == labels for selector in (*selectors, made["Service"]["spec"]["selector"]))
    (source,) = (each["configMapRef"]["name"] for each in envs_of(made["Deployment"]) if "configMapRef" in each)
    assert source == made["ConfigMap"]["metadata"]["name"]
    assert made["ConfigMap"]["data"] == config_map()


def envs_of(deployment: dict[str, Any]) -> list[dict[str, Any]]:
    sources: list[dict[str, Any]] = deployment["spec"]["template"]["spec"]["containers"][0]["envFrom"]
    return sources
