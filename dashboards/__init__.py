"""The Grafana boards as code. `python -m dashboards.generate` writes their JSON."""
