#!/bin/sh
# Downloads the libraries of the page from npm, in the versions and with the checksums of package-lock.json.
#   sh vendor.sh               into vendor/ next to this file: later exports copy it
#   sh vendor.sh DIR/vendor    into a folder that was exported without them
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:-$here/vendor}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here/package.json" "$here/package-lock.json" "$work"
npm ci --prefix "$work" --ignore-scripts --no-audit --no-fund --loglevel=error
modules=$work/node_modules
partial=${target%/}.partial
rm -rf "$partial"
mkdir -p "$partial"
cp "$modules/onnxruntime-web/dist/ort.wasm.bundle.min.mjs" "$partial"
cp "$modules/onnxruntime-web/dist/ort-wasm-simd-threaded.wasm" "$partial"
cp "$modules/@huggingface/tokenizers/dist/tokenizers.min.mjs" "$partial"
cp "$modules/@huggingface/tokenizers/LICENSE" "$partial/LICENSE.tokenizers"
rm -rf "$target"
mv "$partial" "$target"
echo "Vendored: $target"
