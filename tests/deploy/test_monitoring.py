"""The files for Prometheus and Grafana: whole, made by their tool, and in a language that Prometheus reads."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml
from tests.observe.dashboards import DEPLOY, dashboard, expressions, names_in, rule_groups
from tools import grafana


def test_the_dashboard_is_the_one_that_the_tool_writes() -> None:
    assert grafana.TARGET.read_text(encoding="utf-8") == grafana.text(), "run python -m tools.grafana"


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < grafana.WIDTH
        taken |= cells
        assert panel["type"] == "row" or (panel["description"] and panel["targets"])
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)


def test_what_is_counted_in_tokens_shares_no_axis_with_operations() -> None:
    """Tokens come by the thousand, and would press the line of the others onto the axis."""
    panels = [panel for _, row in grafana.ROWS for panel in row if panel.unit == grafana.PER_S]
    assert panels
    for panel in panels:
        assert not [query for query in panel.queries if "tokens" in query.expression], panel.title


def test_panels_ask_the_chosen_servers_only() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            selectors = re.findall(r"\b(?:everystop|http|process)_\w+(\{[^}]*\})?", target["expr"])
            assert selectors
            assert all('instance=~"$instance"' in labels for labels in selectors), target["expr"]


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for group in rule_groups("alerts.yml"):
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert {"summary", "action"} <= rule["annotations"].keys(), rule["alert"]
            assert re.fullmatch(r"Everystop[A-Z]\w+", rule["alert"])


def test_recorded_names_say_level_metric_and_operation() -> None:
    for group in rule_groups("rules.yml"):
        for rule in group["rules"]:
            assert re.fullmatch(r"everystop:\w+:\w+", rule["record"])


def test_prometheus_reads_the_rules_beside_it() -> None:
    settings = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    assert all((DEPLOY / "prometheus" / name).is_file() for name in settings["rule_files"])
    assert settings["scrape_configs"][0]["job_name"] == "everystop"


def test_grafana_finds_source_and_dashboard() -> None:
    folder = DEPLOY / "grafana" / "provisioning"
    sources = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text(encoding="utf-8"))
    assert sources["datasources"][0]["type"] == "prometheus"
    assert yaml.safe_load((folder / "dashboards" / "everystop.yml").read_text(encoding="utf-8"))["providers"]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_expressions_are_promql(where: str, expression: str) -> None:
    """By a parser of Prometheus' language, where one is installed."""
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    parser.parse(expression.replace("$__rate_interval", "1m").replace("$model_name", ".*").replace("$instance", ".*"))


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('sum by (le, model_name) (rate(a_bucket{le="b_c"}[5m])) / c_total', {"a_bucket", "c_total"}),
        ("histogram_quantile(0.95, sum by (le) (rate(vllm:x_bucket[5m]))) > 2", {"vllm:x_bucket"}),
        ("a / ignoring (state) group_left () (b > 0) and on (instance) c", {"a", "b", "c"}),
    ],
)
def test_names_are_found_in_expressions(expression: str, names: set[str]) -> None:
    assert names_in(expression) == names


def test_alerts_come_up_when_they_should_and_not_else() -> None:
    """By Prometheus' own tool, where it is installed."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    folder = DEPLOY / "prometheus"
    for words in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        result = subprocess.run([promtool, *words], cwd=folder, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_test() -> None:
    text = (DEPLOY / "prometheus" / "alerts_test.yml").read_text(encoding="utf-8")
    alerts = [rule["alert"] for group in rule_groups("alerts.yml") for rule in group["rules"]]
    assert f"exp_samples: [{{value: {len(alerts)}}}]" in text, "all of them fire on a server in trouble"
