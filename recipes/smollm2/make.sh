#!/bin/bash
# From nothing to the policy that ships, and from it to every figure of docs/results/smollm2. Each step goes on where it
# was interrupted. Needs pip install '.[train,eval,llamacpp]'.
#
#     recipes/smollm2/make.sh DATA [OUTPUT]
set -e
here=$(dirname "$0") data=$1 output=${2:-out}
policy=(--model smollm2 --base-model transformers:smollm2-raw)
raw=(--model transformers:smollm2-raw --chunk-tokens 384 --memory-tokens 160 --output-tokens 160)
evaluate() { memagent eval run --data "$data" -r memagent --seed 0 "$@"; }

memagent train sft "$here/recipe.toml" --output "$output/first" --data "$data"
last=$output/first runs=("$output/first")
for part in second third fourth fifth sixth; do
    memagent train sft "$here/$part.toml" --adapter "$last/policy/adapter" --output "$output/$part" --data "$data"
    last=$output/$part runs+=("$output/$part")
done
python "$here/ship.py" "${runs[@]}"

needles=(-t niah_single_1 -t niah_single_2 -t niah_single_3 -t niah_multikey_1)
several=(-t niah_multivalue -t niah_multiquery -t vt)
questions=(-t qa_1@1024 -t ruler_hqa@4,8 -t babilong_qa1@1024 -t prose_direct@1024 -t prose_reworded@1024 -t cloze@1024
    -t article@1024)
evaluate "${policy[@]}" "${needles[@]}" "${several[@]}" "${questions[@]}" -l 1024 --samples 16 -o "$output/short.jsonl"
evaluate "${raw[@]}" "${needles[@]}" "${several[@]}" "${questions[@]}" -l 1024 --samples 8 -o "$output/raw.jsonl"
evaluate "${policy[@]}" "${needles[@]}" -l 16384 --samples 8 -o "$output/long.jsonl"
python "$here/manual.py" "$output/manual.jsonl"
evaluate "${policy[@]}" -t "jsonl:$output/manual.jsonl" --samples 20 -o "$output/manual_answers.jsonl"
python "$here/ship.py" "${runs[@]}" "$output/short.jsonl" "$output/long.jsonl"
memagent eval report "$output/short.jsonl" "$output/long.jsonl" -o "$output/report"
for run in "${runs[@]}"; do memagent train plot "$run"; done
