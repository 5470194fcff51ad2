"""Numbers of stores for people: what hosts report, the dashboard's page, Prometheus."""
