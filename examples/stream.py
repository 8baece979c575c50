"""Stream one answer: each piece of text is printed as soon as it is generated."""

from penstock import Client

with Client() as client:
    job = client.submit([{"role": "user", "content": "Name three rivers."}], max_tokens=48, temperature=0)
    for chunk in job.stream():
        print(chunk.text, end="", flush=True)
    usage = job.result().usage

print(f"\n{usage}")
