"""Texts to vectors for programs without Python: what OpenAI's clients ask for embeddings, and Cohere's for ranks.

process.py        `burst serve DEVICE --embeddings FOLDER --http ADDRESS`: everything below, until SIGTERM
vector_api.py     paths, JSON and errors; api_requests.py   what a request may say
text_models.py    a folder's model on a device: it embeds, or it ranks
text_metrics.py   what /metrics says of that
token_batches.py  token ids of texts to arrays with little padding
text_tokenizer.py, pooling.py   what stands before the model, and after it
model_folder.py   folders as sentence-transformers and fastembed lay them out
"""
