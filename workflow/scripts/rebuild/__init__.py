"""What the workflow's scripts share: contracts, checks, clients and formats; it knows nothing of Snakemake."""
