// Reads a stream to its end by `@durable-streams/client` as it is, and prints each message as a line of JSON.

import { stream } from "@durable-streams/client";

const { PENSTOCK_STREAM: url, PENSTOCK_LIVE: live } = process.env;
const reading = await stream({ url, offset: "-1", live });
for await (const message of reading.jsonStream()) console.log(JSON.stringify(message));
