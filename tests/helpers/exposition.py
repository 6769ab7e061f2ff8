"""What a server's /metrics says."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def families(client):
    """Metric families by name."""
    body = client.get("/metrics").body.decode()
    return {family.name: family for family in text_string_to_metric_families(body)}


def value(found, name, **labels):
    """The sum of the samples of this name with these labels."""
    family = name.removesuffix("_total").removesuffix("_count").removesuffix("_sum")
    return sum(
        sample.value
        for sample in found[family].samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
