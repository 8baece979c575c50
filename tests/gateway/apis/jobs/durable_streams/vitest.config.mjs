export default { test: { include: ["suite.test.mjs"], testTimeout: 60000 } };
