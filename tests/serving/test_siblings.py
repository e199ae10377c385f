"""Whichever gateway process is scraped tells the metrics of all."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from serving.telemetry.siblings import Siblings, merged

ONE = b"# HELP fanlight_requests_total Requests\n# TYPE fanlight_requests_total counter\nfanlight_requests_total 2.0\n"
TWO = (
    b"# HELP fanlight_requests_total Requests\n# TYPE fanlight_requests_total counter\n"
    b'fanlight_requests_total{model="a b",outcome="ok"} 3.0\n'
    b"# HELP fanlight_in_flight Now\n# TYPE fanlight_in_flight gauge\nfanlight_in_flight 1.0\n"
)


def test_families_stay_together_and_every_series_names_its_process() -> None:
    text = merged([("web-1", ONE), ("gateway-2", TWO)]).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(families) == {"fanlight_requests", "fanlight_in_flight"}
    samples = {(s.labels["process"], s.labels.get("model")): s.value for s in families["fanlight_requests"].samples}
    assert samples == {("web-1", None): 2.0, ("gateway-2", "a b"): 3.0}
    assert text.count("# TYPE fanlight_requests_total") == 1


async def test_processes_find_each_other_and_forget_the_dead(root: Path) -> None:
    folder = root / "metrics"
    one, two = Siblings(folder, "web-1", lambda: ONE), Siblings(folder, "gateway-2", lambda: TWO)
    await one.start()
    await two.start()
    assert await one.all_metrics() == merged([("web-1", ONE), ("gateway-2", TWO)])
    await two.stop()
    dead = Siblings(folder, "gateway-3", lambda: TWO)
    await dead.start()
    assert dead._server is not None
    dead._server.close()  # as if killed: nobody listens, and its socket is left behind
    (folder / "gateway-3.sock").touch()
    assert await one.all_metrics() == merged([("web-1", ONE)])
    await one.stop()
