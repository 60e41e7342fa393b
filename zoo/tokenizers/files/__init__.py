"""Reading tokenizers: tokenizer.json, models of SentencePiece, and the settings in the files of a checkpoint."""
