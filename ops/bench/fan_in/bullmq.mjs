// Fan-in through BullMQ, for bench.studies.fan_in: `node bullmq.mjs MODULES REDIS_SOCKET NUM_JOBS`.
// Empty jobs, and one that waits for all of them and gets their results. The last line is the seconds that this took.
import { fork } from 'node:child_process'
import { createRequire } from 'node:module'

const [modules, path, numJobs, role] = process.argv.slice(2)
const { FlowProducer, QueueEvents, Worker } = createRequire(`${modules}/`)('bullmq')
const connection = { path, maxRetriesPerRequest: null }
const CONCURRENCY = 64

if (role === 'worker') {
  const workers = [
    new Worker('rows', async () => 'word', { connection, concurrency: CONCURRENCY }),
    new Worker('all', async (job) => Object.values(await job.getChildrenValues()).join(' ').length, { connection }),
  ]
  await Promise.all(workers.map((one) => one.waitUntilReady()))
  process.send('ready')
} else {
  const worker = fork(process.argv[1], [modules, path, numJobs, 'worker'])
  await new Promise((resolve) => worker.once('message', resolve))
  const flows = new FlowProducer({ connection })
  const events = new QueueEvents('all', { connection })
  await events.waitUntilReady()
  const run = async (num) => {
    const children = Array.from({ length: num }, (_, at) => ({ name: 'row', queueName: 'rows', data: { at } }))
    const { job } = await flows.add({ name: 'all', queueName: 'all', children })
    return job.waitUntilFinished(events, 600000)
  }
  await run(10)
  const begun = process.hrtime.bigint()
  const size = await run(Number(numJobs))
  const seconds = Number(process.hrtime.bigint() - begun) / 1e9
  if (size !== 5 * Number(numJobs) - 1) throw new Error(`the last job got ${size} characters`)
  worker.kill()
  console.log(seconds)
  process.exit(0)
}
