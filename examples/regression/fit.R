# Fits a line to R's own `cars` and writes the coefficients.
fit <- lm(dist ~ speed, data = cars)
write.csv(as.data.frame(coef(summary(fit))), "coefficients.csv")
cat(sprintf("stopping distance grows by %.2f ft per mph\n", coef(fit)[["speed"]]))
