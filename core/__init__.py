"""The core: BERT and Llama from scratch, and four papers on early exit, one readable file each."""
